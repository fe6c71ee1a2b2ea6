"""The evidence: the documents that each method gives the LM for one example."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from replug.config.methods import GENREAD, RANDOM, Method
from replug.data.files import replace_file
from replug.data.store import CorpusStore
from replug.models.black_box_lm import AsyncLM, Mixture, mapped
from replug.models.ensemble import POSTERIOR_WEIGHTS, REPLUG_WEIGHTS, Weighting, prior_log_weights
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature
from replug.models.generation import Generated, GenerationOptions


@dataclass(frozen=True, slots=True)
class RetrievedDocuments:
    """The documents of one source for all N examples: rows [N, K] of the corpus, nearest first, and similarities.

    `temperature` is the temperature of the ensemble.
    """

    doc_rows: np.ndarray
    similarities: np.ndarray
    temperature: EnsembleTemperature = PAPER

    def save(self, path: Path) -> None:
        content = io.BytesIO()
        temperature = np.array(json.dumps(asdict(self.temperature)))
        np.savez(content, doc_rows=self.doc_rows, similarities=self.similarities, temperature=temperature)
        replace_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> "RetrievedDocuments":
        """Load a saved file, which has a checksum of each array."""
        with np.load(path, allow_pickle=False) as arrays:
            temperature = EnsembleTemperature(**json.loads(str(arrays["temperature"])))
            return cls(arrays["doc_rows"], arrays["similarities"], temperature)

    def of(self, examples: Sequence[int]) -> "RetrievedDocuments":
        """Return the documents of these examples."""
        return replace(self, doc_rows=self.doc_rows[examples], similarities=self.similarities[examples])


def random_documents(num_documents: int, num_examples: int, k: int, seed: int) -> RetrievedDocuments:
    """Draw documents uniformly without replacement, reproducibly by the seed; all have similarity 0."""
    rng = np.random.default_rng([seed, 1])
    rows = np.stack([rng.choice(num_documents, size=k, replace=False) for _ in range(num_examples)])
    return RetrievedDocuments(rows, np.zeros(rows.shape))


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """A document that an LM wrote for a question; `text` is None if it is empty. Token counts come from the LM."""

    text: str | None
    prompt_tokens: int | None
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Texts [K] to put before the prompt, one at a time, and the logarithms of their initial weights [K].

    The text None means the LM without documents. `doc_rows` are the corpus rows of all documents: more than texts if
    they are concatenated into one, nearest last, so that an overlong text should be cut at its beginning.
    `weighting` is the rule that updates the weights. `votes`: the texts give separate answers, which vote.
    """

    texts: tuple[str | None, ...]
    log_prior: np.ndarray
    doc_rows: tuple[int, ...] = ()
    is_concatenated: bool = False
    weighting: Weighting = REPLUG_WEIGHTS
    votes: bool = False

    @property
    def weights(self) -> np.ndarray:
        """Return the initial weights [K] of the texts, with sum 1."""
        weights = np.exp(self.log_prior)
        return weights / weights.sum()

    def submit(self, lm: AsyncLM, prompts: Sequence[str], options: GenerationOptions) -> Future[Generated]:
        """Return a future of the single answer to the prompts, one prompt for each text."""
        mixture = Mixture(prompts, self.weights.tolist(), replace(self.weighting, votes=self.votes))
        return mapped(mixture.submit(lm, options), mixture.answer)

    def final(self, weights: np.ndarray) -> dict[str, list[float]]:
        """Return the final weights [K], or votes, as a detail of the outcome; empty if weights are fixed."""
        return {"final_weights": weights.round(6).tolist()} if self.weighting.share < 1 or self.votes else {}


NOTHING = Evidence((None,), np.zeros(1))


class EvidenceBook:
    """The evidence of every method for every example.

    `found` maps a source to rows and similarities of all examples.

    `retrieves[row]` is False for an example with a blank query. `written` are the documents of `genread`, one for each
    example, if a method needs them. `posterior` is the weighting of methods with weights that follow the text. `cut`
    shortens documents before the LM reads them.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        corpus: CorpusStore | None,
        found: Mapping[str, RetrievedDocuments],
        retrieves: Sequence[bool],
        written: Sequence[WrittenDocument] = (),
        posterior: Weighting = POSTERIOR_WEIGHTS,
        cut: Callable[[str], str] = str,
    ) -> None:
        self.methods, self._cut = methods, cut
        self._posterior = posterior
        self._store, self._found, self._retrieves, self._written = corpus, found, retrieves, written

    def of(self, row: int) -> dict[str, Evidence]:
        """Return an example's evidence by method name, in the methods' order."""
        return {method.name: self._evidence(method, row) for method in self.methods}

    def nearest(self, method: Method, row: int) -> str | None:
        """Return the text of the first document; None for a method without documents."""
        if method.source == GENREAD:
            return self._written[row].text
        if not method.takes_from_corpus:
            return None
        [text] = self._corpus.texts(self._found[method.source].doc_rows[row, :1])
        return self._cut(text)

    def similarities(self, method: Method, row: int) -> np.ndarray:
        """Return the similarities [K] of all retrieved documents, nearest first; empty without a retriever."""
        if not method.takes_from_corpus or method.source == RANDOM or not self._retrieves[row]:
            return np.empty(0)
        return self._found[method.source].similarities[row]

    def written(self, method: Method, row: int) -> WrittenDocument | None:
        """Return the document that the LM wrote for a `genread` method; None for other methods and blank queries."""
        return self._written[row] if method.source == GENREAD and self._retrieves[row] else None

    def ids(self, doc_rows: Sequence[int]) -> list[str]:
        """Return the ids of documents by their rows."""
        return [document.id for document in self._corpus.documents(list(doc_rows))] if doc_rows else []

    def digest(self) -> str:
        """Return a hash of the documents and weights of every method for every example."""
        digest = hashlib.sha256(repr((self.methods, self._retrieves)).encode())
        for method in self.methods:
            if method.source == GENREAD:
                digest.update(repr(self._written).encode())
            elif method.takes_from_corpus:
                found = self._found[method.source]
                for values in (found.doc_rows, found.similarities):
                    digest.update(values[:, : method.k].tobytes())
            if (temperature := self.temperature(method)) != 1:
                digest.update(f"{method.name} at {temperature!r}".encode())
            if method.follows_text:
                digest.update(repr(self._posterior).encode())
        return digest.hexdigest()

    def temperature(self, method: Method) -> float:
        """Return the temperature of a method's ensemble; 1 for a method without weights by similarity."""
        return self._found[method.source].temperature.value if method.is_weighted else PAPER.value

    def all_texts(self) -> Iterator[str]:
        """Iterate over the texts of the whole corpus."""
        return (document.text for document in self._store.iterate()) if self._store else iter(())

    @property
    def _corpus(self) -> CorpusStore:
        assert self._store is not None, "no method retrieves, so there are no documents"
        return self._store

    def _evidence(self, method: Method, row: int) -> Evidence:
        if method.source == GENREAD and self._retrieves[row]:
            return Evidence((self._written[row].text,), np.zeros(1))
        weighting = self._posterior if method.follows_text else REPLUG_WEIGHTS
        if not method.takes_from_corpus or not self._retrieves[row]:
            return replace(NOTHING, weighting=weighting)
        found = self._found[method.source]
        rows = found.doc_rows[row, : method.k]
        texts, doc_rows = [*map(self._cut, self._corpus.texts(rows))], tuple(int(doc) for doc in rows)
        if method.is_concatenated:
            return Evidence(("\n".join(reversed(texts)),), np.zeros(1), doc_rows, is_concatenated=True)
        similarities = found.similarities[row, : method.k] if method.is_weighted else np.zeros(len(texts))
        log_prior = prior_log_weights(similarities, self.temperature(method))
        return Evidence(tuple(texts), log_prior, doc_rows, weighting=weighting, votes=method.votes)


def texts_of(evidence: Mapping[str, Evidence]) -> dict[str | None, bool]:
    """Return every text of all methods once, and whether it is concatenated.

    None comes first, then documents written by the LM, single documents by row, and concatenations. The order does not
    depend on the order of methods, because batches and their order determine the last bits of scores.
    """
    placed = [
        ((one.is_concatenated, -1 if text is None or not one.doc_rows else one.doc_rows[place], text is not None), text)
        for one in evidence.values()
        for place, text in enumerate(one.texts)
    ]
    texts: dict[str | None, bool] = {}
    for (is_concatenated, _, _), text in sorted(placed, key=lambda pair: pair[0]):
        texts.setdefault(text, is_concatenated)
    return texts
