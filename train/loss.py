"""The LSR loss (REPLUG, section 4). Pure: tensors in, tensors out.

Shapes: B queries, K documents of each.

    P_R(d | x)  = softmax over d of s(d, x) / gamma
    Q(d | x, y) = softmax over d of z(d, x, y) / beta
    loss        = mean over the batch of KL(Q || P_R)        (ACL text; the arXiv text has KL(P_R || Q))

A contrastive term may stand beside the divergence (`loss.contrastive`, off by default):

    loss of a query = KL + contrastive * C
    C = -log softmax over its documents, and others', of s / gamma, at the document of the highest Q     (InfoNCE)

Only P_R carries a gradient. The distributions are handled as logarithms throughout. To add a loss, write a function,
add it to `LOSSES`, and name it in `config.choices.Direction`; likewise `LM_SCORES` and `config.choices.LMScore`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

# Name -> z from the summed and the mean log-probs of the continuation, [B, K] each.
LM_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_logprob": lambda sums, means: means,
    "inverse_perplexity": lambda sums, means: means.exp(),
    "sum_logprob": lambda sums, means: sums,
    "probability": lambda sums, means: sums.exp(),
}


def lm_scores(sum_logprobs: Tensor, num_tokens: Tensor, kind: str) -> Tensor:
    """Return z [B, K] from the continuation's summed log-probs [B, K] (nats) and its token counts [B].

    `probability` is the papers' literal P(y | d, x); over a hundred tokens it underflows and Q is uniform.
    """
    return LM_SCORES[kind](sum_logprobs, sum_logprobs / num_tokens[:, None])


def log_likelihood(scores: Tensor, temperature: float) -> Tensor:
    """Return the log softmax over documents of scores [B, K] / temperature: P_R from similarities, Q from LM scores."""
    return log_softmax(scores / temperature, dim=-1)


def kl_lm_retriever(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(Q || P_R) of each query, nats [B]: the retriever covers the documents that the LM prefers."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def kl_retriever_lm(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(P_R || Q) of each query, nats [B]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# Name -> loss of each query [B] from log Q and log P_R [B, K].
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_lm_retriever": kl_lm_retriever,
    "kl_retriever_lm": kl_retriever_lm,
}


def text_losses(log_q: Tensor, log_p: Tensor, direction: str) -> Tensor:
    """Return the loss named `direction` of each query, nats [B]."""
    return LOSSES[direction](log_q.detach(), log_p)


def contrastive_losses(scores: Tensor, log_q: Tensor, others: Tensor) -> Tensor:
    """Return InfoNCE on the LM's best document of each query, nats [B].

    `scores` are s / gamma [B, K]. `others` [B, M] are s / gamma of further documents, which the LM has not scored;
    minus infinity marks the query's own candidates. The first of tied documents counts as the best.
    """
    return (
        -log_softmax(torch.cat([scores, others], dim=-1), dim=-1).gather(-1, log_q.argmax(-1, keepdim=True)).squeeze(-1)
    )


def entropy(log_p: Tensor) -> Tensor:
    """Return the entropy of each distribution over documents, nats [B]."""
    return -(log_p.exp() * log_p).sum(-1)
