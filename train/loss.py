"""The LSR loss (REPLUG, section 4). Pure: tensors in, tensors out.

Shapes: B queries, K documents of each.

    P_R(d | x)  = softmax over d of s(d, x) / gamma
    Q(d | x, y) = softmax over d of z(d, x, y) / beta
    loss        = mean over the batch of KL(Q || P_R)        (ACL text; the arXiv text has KL(P_R || Q))

Only P_R carries a gradient. The distributions are handled as logarithms throughout.
"""

from torch import Tensor
from torch.nn.functional import log_softmax


def lm_scores(sum_logprobs: Tensor, num_tokens: Tensor, kind: str) -> Tensor:
    """z [B, K] from the continuation's summed log-probs [B, K] (nats) and its token counts [B].

    `probability` is the papers' literal P(y | d, x); over a hundred tokens it underflows and Q is uniform.
    """
    means = sum_logprobs / num_tokens[:, None]
    if kind == "mean_logprob":
        return means
    if kind == "inverse_perplexity":
        return means.exp()
    if kind == "sum_logprob":
        return sum_logprobs
    if kind == "probability":
        return sum_logprobs.exp()
    raise ValueError(f"lm_score {kind!r} is unknown")


def log_likelihood(scores: Tensor, temperature: float) -> Tensor:
    """log softmax over documents of scores [B, K] / temperature: P_R from similarities, Q from LM scores."""
    return log_softmax(scores / temperature, dim=-1)


def kl_lm_retriever(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(Q || P_R) of each query, nats [B]: the retriever covers what the LM finds likely."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def kl_retriever_lm(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(P_R || Q) of each query, nats [B]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def lsr_loss(log_q: Tensor, log_p: Tensor, direction: str) -> Tensor:
    """Mean KL over the batch, a scalar in nats."""
    kl = {"kl_lm_retriever": kl_lm_retriever, "kl_retriever_lm": kl_retriever_lm}[direction]
    return kl(log_q.detach(), log_p).mean()


def entropy(log_p: Tensor) -> Tensor:
    """Entropy of each distribution over documents, nats [B]."""
    return -(log_p.exp() * log_p).sum(-1)
