"""REPLUG inference: one prediction from several documents (REPLUG, section 3.2), with weights that follow the text.

    p(y_t | x, y_<t) = sum over d of lambda_t(d) p(y_t | d, x, y_<t)

The prior lambda_1 is softmax(similarities / temperature). The paper has no temperature, which is 1, and keeps the prior
to the last token. Posterior weights follow Bayes' rule: each token says which document explains the text.

    lambda_t+1(d) = (1 - share) lambda_t(d) p(y_t | d, x, y_<t) / p(y_t | x, y_<t) + share lambda_1(d)

A share of 1 keeps the prior. A share of 0 mixes whole texts (RAG-Sequence, Lewis et al. 2020): of T tokens, the loss is
at most that of the best document plus ln(1 / lambda_1(d)) nats. A small share lets a document come back (fixed share,
Herbster and Warmuth 1998), and adds at most (T - 1) ln(1 / (1 - share)) nats to this bound.

The tokens that all prompts end with, such as a question, may move the weights too: before the answer, the weights then
follow the question's likelihood given each document (`Weighting.read`).

Probabilities are mixed, never logits. Pure arithmetic on numpy arrays (K documents, T tokens), with the records of the
retrieved documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

SIMILARITY, POSTERIOR = "similarity", "posterior"  # `ensemble.weights`
SHARE = 0.05  # within 0.0005 bits per byte of the best share on every measured text (docs/results.md)

MIN_TEXTS = 50  # development texts to which a temperature is fitted


def can_fit(num_texts: int) -> bool:
    """Return whether `num_texts` development texts are enough for an ensemble's temperature."""
    return num_texts >= MIN_TEXTS


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the log softmax over the last axis, in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Weighting:
    """A rule for the weights of an ensemble. A share of 1 keeps them, as REPLUG does.

    Documents with a weight below `prune` are dropped. `read` is the number of tokens at the prompts' end that move the
    weights before the answer. With `votes` no predictions are mixed: each document's own answer votes
    (`models.generation.elected`). Raises ValueError for a value out of range.

    >>> Weighting().share
    0.05
    """

    share: float = SHARE
    prune: float = 0.0
    read: int = 0
    votes: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; expected 0 (only the text moves weights) to 1 (weights stay)")
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune is {self.prune}; expected 0 (none) or more, and below 1")
        if not isinstance(self.read, int) or self.read < 0:
            raise ValueError(f"read is {self.read}; expected 0 (none) or more tokens, a whole number")


REPLUG_WEIGHTS, POSTERIOR_WEIGHTS = Weighting(share=1.0), Weighting()


class MovingWeights:
    """The weights of K documents, which move with each observed token.

    `log_weights` [K] predict the next token. `log_prior` [K] is the logarithm of a distribution. A document that falls
    below `prune` is dropped for good, and the others share its weight; the heaviest always stays. `read_logprobs`
    [K, N], the log-probs of the prompt's last tokens, move the weights first, without pruning: the LM has read all
    documents by then.
    """

    def __init__(
        self,
        log_prior: np.ndarray,
        weighting: Weighting = POSTERIOR_WEIGHTS,
        read_logprobs: np.ndarray | None = None,
    ) -> None:
        self.log_weights = self._log_prior = np.asarray(log_prior, dtype=np.float64)
        with np.errstate(divide="ignore"):
            self._log_keep, self._log_share = np.log1p(-weighting.share), np.log(weighting.share)
            self._log_prune = np.log(weighting.prune)
        for logprobs in () if read_logprobs is None else np.asarray(read_logprobs).T:
            self._move(logprobs)

    @property
    def weights(self) -> np.ndarray:
        """Return the weights [K] of the next token, 0 for dropped documents."""
        return np.exp(self.log_weights)

    def see(self, logprobs: np.ndarray) -> float:
        """Move the weights by a token's log-probs [K] given each document; return its log-prob under the mixture."""
        mixed = self._move(logprobs)
        stays = self.log_weights >= min(self._log_prune, self.log_weights.max())
        if not stays.all():
            left_out = np.where(stays, 0.0, -np.inf)
            self.log_weights, self._log_prior = (log_softmax(w + left_out) for w in (self.log_weights, self._log_prior))
        return mixed

    def _move(self, logprobs: np.ndarray) -> float:
        joint = self.log_weights + np.asarray(logprobs, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # raises below
            mixed = float(np.logaddexp.reduce(joint))
        if not math.isfinite(mixed):
            raise impossible_token(logprobs)
        self.log_weights = np.logaddexp(self._log_keep + joint - mixed, self._log_share + self._log_prior)
        return mixed


def common_end(rows: Sequence[Sequence[Any]], most: int) -> int:
    """Return the number of last tokens, at most `most`, that all rows share.

    >>> common_end([["Basel", "who", "is", "he"], ["the", "Rhine", "who", "is", "he"]], 8)
    3
    """
    most = min(most, *map(len, rows))
    return next((n for n in range(most) if any(row[-1 - n] != rows[0][-1 - n] for row in rows)), most)


def prior_log_weights(similarities: Sequence[float] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the logarithms of the documents' prior weights, float64 [K].

    Raises ValueError unless similarities are finite, and the temperature is finite and above 0.
    """
    similarities = np.asarray(similarities, dtype=np.float64)
    if not np.isfinite(similarities).all():
        raise ValueError(f"similarities are {similarities.tolist()}; expected finite numbers")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
    return log_softmax(similarities / temperature) if similarities.size else similarities


def document_weights(similarities: Sequence[float] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the weights of `prior_log_weights`, which sum to 1."""
    weights = np.exp(prior_log_weights(similarities, temperature))
    return weights / weights.sum()


def mix(
    token_logprobs: np.ndarray,
    log_prior: np.ndarray,
    weighting: Weighting = REPLUG_WEIGHTS,
    read_logprobs: np.ndarray | None = None,
) -> np.ndarray:
    """Return the log-probs of `mix_and_weigh`."""
    return mix_and_weigh(token_logprobs, log_prior, weighting, read_logprobs)[0]


def mix_and_weigh(
    token_logprobs: np.ndarray,
    log_prior: np.ndarray,
    weighting: Weighting = REPLUG_WEIGHTS,
    read_logprobs: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs [T] of the mixture (nats, float64), and its weights [K, T + 1], the last ones after the text.

    Members have the log-probs `token_logprobs` [K, T] and log prior weights [K]. A share of 1 keeps the prior; else
    `read_logprobs` [K, N] of the prompt's last tokens move it first. Raises ValueError for a token without a finite
    log-prob under any member.
    """
    token_logprobs = np.asarray(token_logprobs, dtype=np.float64)
    if weighting.share != 1 or weighting.prune:
        moving = MovingWeights(log_prior, weighting, read_logprobs)
        seen, columns = [], [moving.weights]
        for given in token_logprobs.T:
            seen.append(moving.see(given))
            columns.append(moving.weights)
        return np.array(seen), np.array(columns).T
    weighted = token_logprobs + log_prior[:, None]
    largest = weighted.max(axis=0)
    with np.errstate(invalid="ignore"):  # refused below
        mixed: np.ndarray = largest + np.log(np.exp(weighted - largest).sum(axis=0))
    if not np.isfinite(mixed).all():
        raise impossible_token(token_logprobs[:, np.isfinite(mixed).argmin()])
    return mixed, np.exp(log_prior)[:, None].repeat(len(mixed) + 1, axis=1)


def impossible_token(logprobs: np.ndarray) -> ValueError:
    """Return the error for a token with log-probs [K] that mix to no finite number."""
    shown = np.asarray(logprobs).tolist()
    return ValueError(f"a token has the log-probs {shown}; expected a finite one given some document that is left")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A retrieved document. Its weight is the ensemble's softmax of `similarity` among its search's documents.

    `source` names the text that the document was cut from, where the retriever knows it.

    >>> lm = ReplugLM(StandInLM(), EncoderRetriever(Encoder("stand_in"), ["Basel lies on the Rhine."]), k=1)
    >>> given = [Retrieved("Nantes lies on the Loire.", similarity=0.8, id="nantes")]  # or lm.retrieve([text])[0]
    >>> lm.score("Its river is the", " Loire.", given).sum_logprob > lm.score("Its river is the", " Loire.").sum_logprob
    True
    """

    text: str
    similarity: float
    id: str
    source: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.similarity):
            raise ValueError(f"document {self.id} has the similarity {self.similarity}; expected a finite number")


class Retriever(Protocol):
    """A search for documents; equal queries return equal results.

    >>> class Shelf:
    ...     def retrieve(self, queries, k):
    ...         return [[Retrieved("Basel lies on the Rhine.", 1.0, "basel")][:k] for _ in queries]
    >>> ReplugLM(StandInLM(), Shelf(), k=1).retrieve(["Basel"])[0][0].id
    'basel'
    """

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Return up to `k` documents for each query, the most similar first."""
