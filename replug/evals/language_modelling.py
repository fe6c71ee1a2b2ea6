"""Language modelling: how well texts are predicted, in bits per byte and perplexity (REPLUG, section 6.1).

The texts are the held-out texts of a prepared set, or spans of whole texts, which score every token once. A span's
tokens are scored after `context_tokens` of the preceding text, and documents are retrieved for its last `query_tokens`
(In-Context RALM's query length; REPLUG has 128 of each). The first span of a text has no query, so every method scores
it without documents, and it counts. With `texts.join` this concerns only the first of all texts, as in the authors'
code for Wikitext. Perplexity by word counts words and line ends, Wikitext's `<eos>` (Merity et al. 2016); a word split
between spans counts once, in the span of its first character.

Oracles with the same documents stand beside each ensemble:

best_document   the single document, of K, with which the LM predicts the text best
q_weighted      the mixture weighted by the LM scores, softmax(mean log-prob / beta): the target of the retriever's
                weights in training (REPLUG, section 4.2), so tuning can hardly give more with these documents
half_weighted   each half of the text by the mixture weighted by the LM scores of the other half

The first two know the predicted text, unlike any retriever. So part of their gain is luck: of K unrelated documents the
best still fits a text better than the mean. The gain of the third is predictable: its weights have not seen the words
that they predict.
"""

import itertools
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from replug.config.errors import RunError, UserError
from replug.config.evaluation_schema import EvaluationConfig, TextsConfig
from replug.config.methods import POSTERIOR, Method
from replug.config.rules import evaluation_methods, require_room
from replug.config.schema import LMConfig
from replug.data.records import Example
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.store import Corpus, PreparedSet
from replug.data.tokenizing import load_plain, token_ends
from replug.evals.evidence import Evidence, EvidenceBook, texts_of
from replug.evals.folder import EvaluationFolder
from replug.evals.intervals import bits_of
from replug.evals.loop import Item, Metric, Outcome, Outcomes, PromptedLM, Row, Task
from replug.evals.results import Results
from replug.evals.tables import Blocks
from replug.models.black_box_lm import ContinuationScore, common_read, reading
from replug.models.ensemble import mix, mix_and_weigh, prior_log_weights
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate

log = logging.getLogger(__name__)

WORD_OR_LINE_END = re.compile(r"\S+|\n")
SPLIT = "test"  # the default for a dataset on the hub
BETA = 0.1  # the paper's, unless training used another
HALF_BETA = 0.5  # for the noisier scores of half a text; 0.1 gains nothing (docs/experiments.md)
BEST_DOCUMENT, Q_WEIGHTED, HALF_WEIGHTED = "best_document", "q_weighted", "half_weighted"
ORACLES = {name: f"bits_{name}" for name in (BEST_DOCUMENT, Q_WEIGHTED, HALF_WEIGHTED)}  # name -> number in outcomes
SAMPLED = 500  # texts, and documents, for counting tokens before anything is embedded
LEAST_GAIN = 1e-4  # bits per byte: less headroom is noise


BITS_PER_BYTE = Metric("bits", "bytes")


class LanguageModelling(Task):
    """Score continuations after their contexts. A document that several methods use is scored once."""

    metrics: Mapping[str, Metric] = {
        "bpb": BITS_PER_BYTE,
        "token_perplexity": Metric("bits", "tokens", np.exp2),  # tokens of the LM
        "word_perplexity": Metric("bits", "words", np.exp2),  # words and line ends of the original text
        **{f"bpb_{name}": Metric(bits, "bytes", may_be_unknown=True) for name, bits in ORACLES.items()},
        "passes": Metric("passes", "all_passes", may_be_unknown=True),  # read tokens of documents, with `prune`
    }

    reads: ClassVar[tuple[str, ...]] = (
        *("ensemble", "retrievers"),
        *(f"texts.{field.name}" for field in fields(TextsConfig)),
    )

    def __init__(
        self,
        examples: Sequence[Example],
        tokens_of: Callable[[Example], list[str]] | None = None,
        keeps_documents: bool = False,
        beta: float = BETA,
    ) -> None:
        """Take the examples. With `tokens_of`, which cuts continuations into LM tokens, outcomes have their texts.

        With `keeps_documents` outcomes have `document_logprobs`, an array [K, T] that JSON cannot hold. `beta` is the
        temperature of the oracle `q_weighted`.
        """
        self._tokens_of, self._keeps_documents, self._beta = tokens_of, keeps_documents, beta
        self._spans, self._num_words = list(examples), [*map(num_words, examples)]
        self.examples = items_of(examples)

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
        data, keys = config.data, config.texts
        if not (keys.path or data.source or data.prepared or (data.train and data.heldout)):
            yield "texts.path is missing; expected texts to measure, or held-out ones: data.prepared or data.source"
        if keys.path:
            return
        usual = TextsConfig(max_examples=keys.max_examples, document_tokens=keys.document_tokens)
        for field in fields(TextsConfig):
            if getattr(keys, field.name) != getattr(usual, field.name):
                yield f"texts.{field.name} is set, but held-out texts are measured as they are; expected texts.path"

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        spans = read_spans(config, corpus)
        task = cls(spans)
        task.cut = document_cutter(config)
        require_room_for(config, spans, corpus, task.cut)
        task.queries, task.predicted = [span.query for span in spans], [span.continuation for span in spans]
        return task

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        super().open(lms, book)
        assert lms is not None
        self._lm, self._template, template = lms.lm, lms.template, lms.template
        self._spans = [replace(one, continuation=template.continuation(one.continuation)) for one in self._spans]

    def compared(self, row: int) -> tuple[str, ...]:
        span = self._spans[row]
        return span.context + span.continuation, span.continuation

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        span = self._spans[row]
        prompt = self._prefixes(span, {method: evidence})[evidence.texts[0]]
        return {"references": [span.continuation], "prompt": prompt}

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        span = self._spans[row]
        prefixes = self._prefixes(span, evidence)
        prompts = list(dict.fromkeys(prefixes.values()))
        read = max(one.weighting.read for one in evidence.values())
        future = self._lm.submit(prompts, [span.continuation] * len(prompts), **reading(read))

        def finish() -> Outcomes:
            scores = dict(zip(prompts, future.result(), strict=True))
            return {
                name: self._outcome(row, one, [scores[prefixes[text]] for text in one.texts])
                for name, one in evidence.items()
            }

        return finish

    def _prefixes(self, span: Example, evidence: Mapping[str, Evidence]) -> dict[str | None, str]:
        """Return the prefix after each document."""
        return {
            text: self._template.prefix(text, span.context, span.continuation, keep_end)
            for text, keep_end in texts_of(evidence).items()
        }

    def _outcome(self, row: int, evidence: Evidence, scores: Sequence[ContinuationScore]) -> Outcome:
        span, by_document, read = (
            self._spans[row],
            np.stack([score.token_logprobs for score in scores]),
            common_read(scores),
        )
        if not (np.isfinite(by_document).all() and np.isfinite(read).all()):
            raise RunError(f"{span.id}: the LM gave a token a log-probability that is not finite")
        mixed, weights = mix_and_weigh(by_document, evidence.log_prior, evidence.weighting, read)
        numbers = {
            "bits": bits_of(mixed),
            "bytes": float(len(span.continuation.encode())),
            "tokens": float(len(mixed)),
            "words": float(self._num_words[row]),
            **oracle_bits(by_document, self._beta),
        }
        if evidence.weighting.prune:
            numbers |= {"passes": float((weights[:, :-1] > 0).sum()), "all_passes": float(by_document.size)}
        tokens = {"token_texts": self._tokens_of(span)} if self._tokens_of else {}
        documents = {"document_logprobs": by_document} if self._keeps_documents else {}
        mixture = {"token_logprobs": [round(float(value), 6) for value in mixed], **evidence.final(weights[:, -1])}
        return Outcome(numbers, {**tokens, **documents, **mixture})

    def findings(self, rows: Sequence[Row], results: Results, folder: EvaluationFolder) -> Blocks:
        return [lines] if (lines := headroom_lines(results)) else []


def items_of(examples: Sequence[Example]) -> list[Item]:
    """Return items with the context as query, or only its end for spans with a query."""
    return [Item(one.id, one.query, one.domain, one.gold, one.source) for one in examples]


def document_cutter(config: EvaluationConfig) -> Callable[[str], str]:
    """Return a function that cuts documents to `texts.document_tokens` LM tokens, like the authors' code."""
    from replug.models.build import lm_tokenizer_json

    if (most := config.texts.document_tokens) is None:
        return str
    tokenizer = load_plain(lm_tokenizer_json(config.lm))
    return lambda text: text[: token_borders(tokenizer, text)[: most + 1][-1]]


def require_room_for(
    config: EvaluationConfig, spans: Sequence[Example], corpus: Corpus | None, cut: Callable[[str], str]
) -> None:
    """Raise UserError, before anything is embedded, if texts with documents exceed the LM's context.

    Counts tokens of a sample of both, if the LM's limit and tokenizer are known.
    """
    from replug.models.build import has_tokenizer, lm_max_tokens, lm_tokenizer
    from replug.models.pair_tokens import num_tokens, pair_token_ids

    lm, limit = config.lm, lm_max_tokens(config.lm)
    if limit is None or not has_tokenizer(lm):
        return
    tokenizer = lm_tokenizer(lm)
    template = PromptTemplate(tokenizer, None, lm.prompt, lm.chat)
    sampled = [spans[row] for row in draw_evenly(len(spans), SAMPLED, config.seed)]
    pairs = [pair_token_ids(tokenizer, template.whole("", one.context), one.continuation) for one in sampled]
    document, methods = 0, [method for method in evaluation_methods(config) if method.takes_from_corpus]
    if corpus and methods:
        rows = corpus.corpus.sample(np.random.default_rng(config.seed))[:SAMPLED]
        counts = [num_tokens(tokenizer, cut(text)) for text in corpus.corpus.texts(rows)]
        together = max(method.k if method.is_concatenated else 0 for method in methods)
        document = max(*counts, int(together * np.mean(counts)))
    require_room(lm, limit, max(len(before) + len(after) for before, after in pairs), document)


def read_spans(config: EvaluationConfig, corpus: Corpus | None) -> list[Example]:
    """Return `texts.max_examples` spans, drawn evenly by the seed."""
    from replug.models.preparing import prepared_set

    if config.texts.path:
        spans = _spans_of_texts(config)
    else:
        out = EvaluationFolder(Path(config.out).expanduser())
        data = corpus if isinstance(corpus, PreparedSet) else prepared_set(config.run_config(), out.data)
        log.info(f"measuring {len(data.heldout):,} held-out texts of {data.folder}")
        rows = draw_evenly(len(data.heldout), config.texts.max_examples, config.seed)
        spans = data.heldout.examples(rows)
    if alone := sum(not span.query.strip() for span in spans):
        log.info(f"{alone} of {len(spans)} spans have no text before them and get no documents")
    return spans


def token_texts(lm: LMConfig) -> Callable[[Example], list[str]]:
    """Return a function that cuts a continuation into the texts of its LM tokens, without loss."""
    from replug.models.build import lm_tokenizer
    from replug.models.pair_tokens import token_spans

    tokenizer = lm_tokenizer(lm)

    def cut(example: Example) -> list[str]:
        text = example.continuation
        ends = [end for _, end in token_spans(tokenizer, text, begins=not example.context)]
        return [text[start:end] for start, end in itertools.pairwise([0, *ends[:-1], len(text)])]

    return cut


def _spans_of_texts(config: EvaluationConfig) -> list[Example]:
    from replug.models.build import lm_tokenizer_json

    keys = config.texts
    counted_by = config.lm
    if keys.tokenizer is not None:  # the same spans for several LMs
        counted_by = replace(config.lm, path=keys.tokenizer, url=None, model=None, tokenizer=None)
    tokenizer = load_plain(lm_tokenizer_json(counted_by))
    texts = [*_texts(config)]
    spans = joined_spans(texts, tokenizer, keys) if keys.join else []
    if not keys.join:
        spans = [span for text in texts for span in spans_of(text, tokenizer, keys)]
    return [spans[row] for row in draw_evenly(len(spans), keys.max_examples, config.seed)]


def _texts(config: EvaluationConfig) -> Iterator[SourceText]:
    from replug.data.sources.shards import of_split, plan_source
    from replug.data.sources.texts import read_items

    data = config.data
    fields = FieldMap.of(data.fields, data.new_text_at)
    try:
        plan = plan_source(of_split(str(config.texts.path), SPLIT), fields)
    except UserError as error:
        raise UserError(str(error).replace("data.source", "texts.path")) from error
    plan.say("texts.path")
    # The other field names are for the corpus.
    named = {old: new for old, new in data.fields.items() if old.partition(".")[0] in plan.field_names}
    fields = FieldMap.of(named, data.new_text_at)
    for source_shard in plan.shards:
        for _, item in read_items(source_shard, fields):
            if item is None:
                continue
            if isinstance(item, Rejected):
                raise UserError(f"texts.path: {item}; every text must be readable")
            yield item


def num_words(example: Example) -> int:
    """Return the number of words and line ends that begin in the continuation."""
    units = WORD_OR_LINE_END.finditer(example.context + example.continuation)
    return sum(unit.start() >= len(example.context) for unit in units)


def token_borders(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the start of each token, and the end of the text.

    White space before a word is part of its first token; a character that several tokens share belongs to the earlier.
    """
    return [0, *token_ends(tokenizer, [text])[0][:-1], len(text)]


def spans_of(text: SourceText, tokenizer: Tokenizer, keys: TextsConfig) -> Iterator[Example]:
    """Yield the spans of a text in order, named by their position in the text; the last may be shorter."""
    borders = token_borders(tokenizer, text.text)
    for first in range(0, len(borders) - 1, keys.scored_tokens):
        start, end = borders[first], borders[first : first + keys.scored_tokens + 1][-1]
        if end > start:
            yield Example(
                id=f"{text.id}#{start}-{end}",
                context=text.text[borders[max(0, first - keys.context_tokens)] : start],
                continuation=text.text[start:end],
                domain=text.domain,
                source=text.id,
                query=text.text[borders[max(0, first - keys.query_tokens)] : start],
            )


def joined_spans(texts: Sequence[SourceText], tokenizer: Tokenizer, keys: TextsConfig) -> list[Example]:
    """Return the spans of all texts joined; `source` is the text at a span's start."""
    offsets = [0, *itertools.accumulate(len(text.text) for text in texts)]
    start, spans = 0, list[Example]()
    for span in spans_of(SourceText("", "".join(text.text for text in texts), ""), tokenizer, keys):
        own = texts[bisect_right(offsets, start) - 1]
        spans.append(replace(span, id=f"{own.id}{span.id}", source=own.id, domain=own.domain))
        start += len(span.continuation)
    return spans


def draw_evenly(num_all: int, num: int | None, seed: int) -> list[int]:
    """Draw `num` rows in order, one from each of `num` equal parts; None or too large a number means all.

    Rows of a text are adjacent, so the number of rows drawn from a text is proportional to its length.
    """
    if num is None or num >= num_all:
        return list(range(num_all))
    borders = np.arange(num + 1) * num_all // num
    return [int(row) for row in np.random.default_rng([seed, 4]).integers(borders[:-1], borders[1:])]


# Headroom -------------------------------------------------------------------------------------------------------------


def oracle_bits(token_logprobs: np.ndarray, beta: float = BETA) -> dict[str, float]:
    """Return the bits of a text by each oracle, from its log-probs [K, T] (nats) given each document."""
    given = np.asarray(token_logprobs, dtype=np.float64)
    first, second = np.array_split(given, 2, axis=1)

    def weighed(predicted: np.ndarray, scored: np.ndarray, beta: float) -> float:
        scores = scored.sum(axis=1) / max(1, scored.shape[1])  # [K]; all equal without tokens
        return bits_of(mix(predicted, prior_log_weights(scores, beta)))

    return {
        ORACLES[BEST_DOCUMENT]: min(bits_of(row) for row in token_logprobs),
        ORACLES[Q_WEIGHTED]: weighed(given, given, beta),
        ORACLES[HALF_WEIGHTED]: weighed(second, first, HALF_BETA) + weighed(first, second, HALF_BETA),
    }


def headroom_lines(results: Results) -> list[str]:
    """Return the headroom of each ensemble with fixed weights; a method with a single text has none."""
    lines = []
    for method, of in results.items():
        names = ("bpb", f"bpb_{Q_WEIGHTED}", f"bpb_{BEST_DOCUMENT}", f"bpb_{HALF_WEIGHTED}")
        if all(name in of for name in names) and not method.endswith(f"/{POSTERIOR}"):
            ensemble, q_weighted, best, half = (of[name]["value"] for name in names)
            if max(abs(ensemble - best), abs(ensemble - q_weighted)) > LEAST_GAIN:
                lines.append(
                    f"Headroom of {method}: {ensemble:.4f} bits per byte; {q_weighted:.4f} weighted by the LM's own "
                    f"scores, {best:.4f} by the best document alone. The predictable part: {half:.4f}, each half of a "
                    "text weighted by the scores of the other half."
                )
    return lines
