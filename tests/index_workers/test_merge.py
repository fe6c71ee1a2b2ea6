"""Merging shards against sorting everything at once."""

import itertools

import numpy as np
import pytest

from replug.index_workers.answers import merge_top_k


def brute_force(similarities: np.ndarray, k: int) -> np.ndarray:
    """Rows [B, k] by falling similarity, equals by rising row."""
    order = [sorted(range(len(values)), key=lambda row: (-values[row], row))[:k] for values in similarities]
    return np.array(order)


def split(similarities: np.ndarray, bounds: list[int], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each shard would answer: its own best k, or all it has."""
    parts = []
    for start, end in itertools.pairwise(bounds):
        rows = brute_force(similarities[:, start:end], k)
        parts.append((rows + start, np.take_along_axis(similarities[:, start:end], rows, axis=1)))
    return parts


@pytest.mark.parametrize("levels", [3, 1000], ids=["many ties", "few ties"])
@pytest.mark.parametrize("seed", range(8))
def test_the_answer_is_that_of_sorting_everything_whatever_the_sharding(levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    similarities = (rng.integers(levels, size=(4, 40)) - levels / 2).astype(np.float32)
    k = int(rng.integers(1, 41))
    expected = brute_force(similarities, k)
    cuts = np.sort(rng.choice(np.arange(1, 40), size=3, replace=False)).tolist()
    for bounds in ([0, 40], [0, 2, 40], [0, *cuts, 40]):
        parts = split(similarities, bounds, k)
        for order in (parts, parts[::-1]):
            rows, values = merge_top_k(order, k)
            np.testing.assert_array_equal(rows, expected)
            np.testing.assert_array_equal(values, np.take_along_axis(similarities, expected, axis=1))


def test_equal_similarities_come_in_the_order_of_their_rows() -> None:
    parts = [(np.array([[7, 5]]), np.array([[0.5, 0.5]])), (np.array([[2, 9]]), np.array([[0.5, 0.9]]))]
    rows, similarities = merge_top_k(parts, 3)
    assert rows.tolist() == [[9, 2, 5]]
    assert similarities.tolist() == [[0.9, 0.5, 0.5]]
