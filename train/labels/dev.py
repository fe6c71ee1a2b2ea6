"""How good a retriever is on labelled development texts, without an LM and without an index.

Its similarities order each text's candidates. The ensemble of the first k is mixed at every token (REPLUG, section 3.2)
from the stored log-probs, and is what the LM would say of these documents. Weights are softmax(s / T): unless a T is
given it is the best one, since softmax(s) of cosines that differ by hundredths is nearly uniform whatever was learned.

A search finds other documents than a text's candidates. How many is known without an LM: `scored_share`.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from replug.data.labels import LabelledTexts
from replug.data.store import CorpusStore, WindowStore
from replug.evals.metrics import bits_of
from replug.evals.temperature_fit import DocumentScores, ensemble_bits, fit_temperature
from replug.models.encoder import Encoder
from replug.train.labels.document_vectors import embedded
from replug.train.labels.targets import document_scores
from replug.train.loss import log_likelihood, text_losses
from replug.train.module import LossSettings, VectorsOf


@dataclass(frozen=True, slots=True)
class DevLook:
    """One look at the development texts: bits per byte of the ensemble at `temperature`, and the training loss's KL.

    `scored_share`: of the `k` nearest among the candidates of all development texts, the share that the LM has scored
    for the text. Where it falls, a search finds what `bpb` knows nothing of.
    """

    step: int
    bpb: float
    kl: float
    temperature: float
    scored_share: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """The ensemble: at most `k` documents, at a temperature that is given or the best for the texts."""

    k: int
    temperature: float | None = None


class DevTexts:
    """Labelled development texts, to be looked at again and again; `rows` are the corpus' of all candidates."""

    def __init__(
        self, texts: LabelledTexts, store: WindowStore, corpus: CorpusStore, loss: LossSettings, mixed: Mixed
    ) -> None:
        self._texts, self._corpus, self._loss = texts, corpus, loss
        windows = store.windows()
        self._contexts = [window.context for window in windows]
        self._bytes = sum(len(window.continuation.encode()) for window in windows)
        self.k, self._temperature = min(mixed.k, texts.doc_rows.shape[1]), mixed.temperature
        self.rows, places = np.unique(texts.doc_rows, return_inverse=True)
        self._places = places.reshape(texts.doc_rows.shape)
        scores = torch.from_numpy(document_scores(texts, loss.lm_score))
        self._log_q = log_likelihood(scores, loss.beta)

    @property
    def num_texts(self) -> int:
        return len(self._contexts)

    @property
    def bpb_alone(self) -> float:
        """Bits per byte of the LM without documents."""
        return sum(bits_of(tokens) for tokens in self._texts.token_logprobs_alone) / self._bytes

    def look(self, step: int, encoder: Encoder, vectors_of: VectorsOf | None = None) -> DevLook:
        """By the weights as they are, and documents' vectors where these do not come from the encoder."""
        encoder.eval()
        similarities = self.similarities(encoder, vectors_of)
        own = np.take_along_axis(similarities, self._places, axis=1)
        bpb, temperature = self._bits(own)
        return DevLook(step, bpb, self._kl(own), temperature, scored_share(similarities, self._places, self.k))

    def similarities(self, encoder: Encoder, vectors_of: VectorsOf | None = None) -> np.ndarray:
        """[N, D], of every text and the candidates of all."""
        queries = encoder.encode_query(self._contexts)
        documents = (vectors_of or partial(embedded, encoder, self._corpus))(self.rows)
        found: np.ndarray = (queries @ documents.T).numpy()
        return found

    def _kl(self, similarities: np.ndarray) -> float:
        """Of similarities [N, K] of every text's candidates."""
        log_p = log_likelihood(torch.from_numpy(similarities.astype(np.float64)), self._loss.gamma)
        return float(text_losses(self._log_q, log_p, self._loss.direction).mean())

    def _bits(self, similarities: np.ndarray) -> tuple[float, float]:
        """Bits per byte by similarities [N, K], and the temperature."""
        scores = self.nearest(similarities)
        if self._temperature is not None:
            return ensemble_bits(scores, self._temperature) / self._bytes, self._temperature
        fit = fit_temperature(scores)
        return fit.bits / self._bytes, fit.temperature

    def nearest(self, similarities: np.ndarray) -> list[DocumentScores]:
        """Of every text the first k candidates by similarities [N, K]."""
        return [
            nearest(tokens, of, self.k) for tokens, of in zip(self._texts.token_logprobs, similarities, strict=True)
        ]


def scored_share(similarities: np.ndarray, places: np.ndarray, k: int) -> float:
    """Of the `k` nearest of D documents, by similarities [N, D], the share that are among a text's `places` [N, K]."""
    first = np.argpartition(-similarities, k - 1, axis=1)[:, :k]
    return float(np.mean([np.isin(found, own).mean() for found, own in zip(first, places, strict=True)]))


def nearest(token_logprobs: np.ndarray, similarities: np.ndarray, k: int) -> DocumentScores:
    """Of a text's candidates, log-probs [K, T] and similarities [K], the first `k` by similarity."""
    first = np.argsort(-similarities, kind="stable")[:k]
    return DocumentScores(token_logprobs[first], similarities[first])
