"""Merging the answers of shards into one. Pure."""

from collections.abc import Sequence

import numpy as np


def merge_top_k(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [B, k] and similarities [B, k], best first, from every shard's rows and similarities [B, <=k].

    Equal similarities come in the order of their rows.
    """
    rows = np.concatenate([rows for rows, _ in parts], axis=1)
    similarities = np.concatenate([similarities for _, similarities in parts], axis=1)
    order = np.lexsort((rows, -similarities), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarities, order, axis=1)
