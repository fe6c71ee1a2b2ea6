"""How good a retriever is on labelled development texts, without an LM and without an index.

Its similarities order each text's candidates. The ensemble of the first k is mixed at every token (REPLUG, section 3.2)
from the stored log-probs, and is what the LM would say of these documents. Weights are softmax(s / T): unless a T is
given it is the best one, since softmax(s) of cosines that differ by hundredths is nearly uniform whatever was learned.
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
    """One look at the development texts: bits per byte of the ensemble at `temperature`, and the training loss's KL."""

    step: int
    bpb: float
    kl: float
    temperature: float


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
        return self.measure(step, self.similarities(encoder, vectors_of))

    def similarities(self, encoder: Encoder, vectors_of: VectorsOf | None = None) -> np.ndarray:
        """[N, K] of every candidate."""
        queries = encoder.encode_query(self._contexts).numpy()
        documents = (vectors_of or partial(embedded, encoder, self._corpus))(self.rows)
        found: np.ndarray = np.einsum("nd,nkd->nk", queries, documents.numpy()[self._places])
        return found

    def measure(self, step: int, similarities: np.ndarray) -> DevLook:
        """What similarities [N, K] are worth."""
        log_p = log_likelihood(torch.from_numpy(similarities.astype(np.float64)), self._loss.gamma)
        kl = float(text_losses(self._log_q, log_p, self._loss.direction).mean())
        scores = self.nearest(similarities)
        if self._temperature is not None:
            return DevLook(step, ensemble_bits(scores, self._temperature) / self._bytes, kl, self._temperature)
        fit = fit_temperature(scores)
        return DevLook(step, fit.bits / self._bytes, kl, fit.temperature)

    def nearest(self, similarities: np.ndarray) -> list[DocumentScores]:
        """Of every text the first k candidates by similarities [N, K]."""
        return [
            nearest(tokens, of, self.k) for tokens, of in zip(self._texts.token_logprobs, similarities, strict=True)
        ]


def nearest(token_logprobs: np.ndarray, similarities: np.ndarray, k: int) -> DocumentScores:
    """Of a text's candidates, log-probs [K, T] and similarities [K], the first `k` by similarity."""
    first = np.argsort(-similarities, kind="stable")[:k]
    return DocumentScores(token_logprobs[first], similarities[first])
