"""The loss at several prefixes of the vectors (Matryoshka Representation Learning, Kusupati et al. 2022). Pure.

    loss of a text = mean over the prefixes n of its loss by the first n numbers of the vectors

Each prefix is a retriever of its own: with cosine similarity its vectors have the length 1 again, so that
P_R is that of an index of the first n dimensions. All weigh alike, as in sentence-transformers' MatryoshkaLoss, which
takes their sum where this takes their mean, so that a learning rate suits any number of them.

Shapes: B queries, K documents of each, U documents of the batch, D width.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from replug.models.encoder import first_numbers


def prefix_pairs(
    queries: Tensor, documents: Tensor, dims: Sequence[int], similarity: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors [B, n] and [U, n] for each n of `dims`, of [B, D] and [U, D]; whole ones where `dims` names none."""
    prefixes: Sequence[int | None] = dims or [None]
    for count in prefixes:
        yield first_numbers(queries, count, similarity), first_numbers(documents, count, similarity)


def mean_over_prefixes(losses: Sequence[Tensor]) -> Tensor:
    """Losses of the texts [B], of those at each prefix [B]."""
    return torch.stack(list(losses)).mean(0)
