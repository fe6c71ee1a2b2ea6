"""What a training on labels takes of their numbers: z of each document, a text's gain, and beta from an entropy. Pure.

Arrays: N texts, K documents of each. Log-probs are in nats.
"""

from dataclasses import replace

import numpy as np
import torch

from replug.config.errors import UserError
from replug.data.labels import LabelledTexts
from replug.train.loss import lm_scores
from replug.train.temperature import entropy_share, temperature_for_entropy_share


def document_scores(texts: LabelledTexts, lm_score: str) -> np.ndarray:
    """z [N, K] float64."""
    return _scores(texts.sum_logprobs, texts.num_tokens, lm_score)


def with_scores(texts: LabelledTexts, scores: np.ndarray, lm_score: str, beta: float) -> LabelledTexts:
    """The texts with log-probs of which Q = softmax(z / beta) is softmax(scores), for scores [N, K].

    The mean of each text's z is the LM's, which Q does not see and a run's metrics show. `lm_score` is mean_logprob or
    sum_logprob.
    """
    means = document_scores(texts, lm_score).mean(axis=1, keepdims=True)
    z = means + beta * (scores - scores.mean(axis=1, keepdims=True))
    sums = {"mean_logprob": z * texts.num_tokens[:, None], "sum_logprob": z}[lm_score]
    return replace(texts, sum_logprobs=sums)


def gains(texts: LabelledTexts, lm_score: str) -> np.ndarray:
    """max(0, best z − z without a document) [N]: what retrieving can add for each text."""
    alone = _scores(texts.sum_logprobs_alone[:, None], texts.num_tokens, lm_score)[:, 0]
    gained: np.ndarray = np.maximum(0.0, document_scores(texts, lm_score).max(axis=1) - alone)
    return gained


def query_weights(gained: np.ndarray) -> np.ndarray:
    """Weights [N] of mean 1 in proportion to the gains. Raises UserError where no text gains anything."""
    if not gained.sum() > 0:
        raise UserError(
            "loss.weigh_queries: no labelled text has a document that the LM finds better than none, so all weigh 0: "
            "label other candidates, or leave the key out"
        )
    weights: np.ndarray = gained / gained.mean()
    return weights


def beta_for_entropy(scores: np.ndarray, share: float) -> float:
    """The beta that gives Q this share of the maximal entropy, averaged over texts.

    Raises UserError where no beta does: the LM's scores are equal or nearly so.
    """
    beta = temperature_for_entropy_share(scores, share)
    if beta is None or abs(entropy_share(scores, beta) - share) > 0.01:
        raise UserError(
            f"loss.beta_entropy is {share:g}, but no beta gives Q that share of the maximal entropy: the LM's scores "
            "are equal or nearly so"
        )
    return beta


def _scores(sums: np.ndarray, num_tokens: np.ndarray, kind: str) -> np.ndarray:
    scores: np.ndarray = lm_scores(torch.tensor(sums), torch.tensor(num_tokens), kind).numpy()
    return scores
