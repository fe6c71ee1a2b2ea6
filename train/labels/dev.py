"""How good a retriever is on labelled development texts, without an LM and without an index.

Its similarities order each text's candidates. The ensemble of the first k is mixed at every token (REPLUG, section 3.2)
from the stored log-probs, and is what the LM would say of these documents. Weights are softmax(s / T): T is the best of
a few, since softmax(s) of cosines that differ by hundredths is nearly uniform whatever was learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from replug.data.labels import LabelledTexts
from replug.data.store import CorpusStore, WindowStore
from replug.evals.metrics import bits_of
from replug.models.encoder import Encoder
from replug.models.ensemble import mix_token_logprobs
from replug.train.labels.targets import document_scores
from replug.train.loss import log_likelihood, text_losses
from replug.train.module import LossSettings

TEMPERATURES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)


@dataclass(frozen=True, slots=True)
class DevLook:
    """One look at the development texts: bits per byte of the ensemble at `temperature`, and the training loss's KL."""

    step: int
    bpb: float
    kl: float
    temperature: float


class DevTexts:
    """Labelled development texts, to be looked at again and again."""

    def __init__(
        self, texts: LabelledTexts, store: WindowStore, corpus: CorpusStore, loss: LossSettings, k: int
    ) -> None:
        """`k` documents are mixed, at most as many as there are candidates."""
        self._texts, self._corpus, self._loss = texts, corpus, loss
        windows = store.windows()
        self._contexts = [window.context for window in windows]
        self._bytes = sum(len(window.continuation.encode()) for window in windows)
        self._k = min(k, texts.doc_rows.shape[1])
        self._unique, places = np.unique(texts.doc_rows, return_inverse=True)
        self._places = places.reshape(texts.doc_rows.shape)
        scores = torch.from_numpy(document_scores(texts, loss.lm_score))
        self._log_q = log_likelihood(scores, loss.beta)

    @property
    def bpb_alone(self) -> float:
        """Bits per byte of the LM without documents."""
        return sum(bits_of(tokens) for tokens in self._texts.token_logprobs_alone) / self._bytes

    def look(self, step: int, encoder: Encoder, documents: Encoder) -> DevLook:
        """By the weights as they are; `documents` encodes the documents."""
        encoder.eval()
        return self.measure(step, self.similarities(encoder, documents))

    def similarities(self, encoder: Encoder, documents: Encoder) -> np.ndarray:
        """[N, K] of every candidate."""
        queries = encoder.encode(self._contexts).numpy()
        vectors = documents.encode_tokens(documents.document_ids(self._corpus, self._unique)).numpy()
        found: np.ndarray = np.einsum("nd,nkd->nk", queries, vectors[self._places])
        return found

    def measure(self, step: int, similarities: np.ndarray) -> DevLook:
        """What similarities [N, K] are worth."""
        log_p = log_likelihood(torch.from_numpy(similarities.astype(np.float64)), self._loss.gamma)
        kl = float(text_losses(self._log_q, log_p, self._loss.direction).mean())
        bpb, temperature = min((self.bpb(similarities, at), at) for at in TEMPERATURES)
        return DevLook(step, bpb, kl, temperature)

    def bpb(self, similarities: np.ndarray, temperature: float) -> float:
        """Bits per byte of the ensemble of each text's first k candidates."""
        return ensemble_bits(self._texts.token_logprobs, similarities, self._k, temperature) / self._bytes


def ensemble_bits(token_logprobs: Sequence[np.ndarray], similarities: np.ndarray, k: int, temperature: float) -> float:
    """Bits of all texts, whose candidates have token log-probs [K, T] each and similarities [N, K]."""
    bits = 0.0
    for tokens, of in zip(token_logprobs, similarities, strict=True):
        first = np.argsort(-of, kind="stable")[:k]
        bits += bits_of(mix_token_logprobs(tokens[first], of[first] / temperature))
    return bits
