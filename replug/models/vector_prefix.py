"""The first numbers of a vector as a vector of its own (Matryoshka: Kusupati et al. 2022). Pure.

An index of the first n dimensions, and the loss at several prefixes, both take them here.
"""

from torch import Tensor
from torch.nn.functional import normalize


def first_numbers(vectors: Tensor, count: int | None, similarity: str) -> Tensor:
    """The first `count` numbers of vectors [..., D], None for all; with cosine similarity of length 1 again.

    Raises ValueError where the vectors have fewer.
    """
    if count is None or count == vectors.shape[-1]:
        return vectors
    if not 0 < count < vectors.shape[-1]:
        raise ValueError(f"vectors of {vectors.shape[-1]} numbers have no first {count}")
    prefix = vectors[..., :count]
    return normalize(prefix, dim=-1) if similarity == "cosine" else prefix
