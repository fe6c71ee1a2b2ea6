"""Vectors grown from real ones: the same every time, of norm 1, and near to those that they were grown from."""

import numpy as np

from benchmarks.grown_vectors import NEIGHBOURS, Grower, neighbours_of
from benchmarks.host_search import rows_of


def clusters(count: int, size: int, dim: int = 16) -> np.ndarray:
    """Unit vectors [count * size, D] float16 in tight clusters, one after the other."""
    rng = np.random.default_rng(0)
    centres = np.repeat(rng.standard_normal((count, dim)), size, axis=0)
    vectors = centres + 0.1 * rng.standard_normal(centres.shape)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def test_neighbours_are_the_nearest_others():
    near = neighbours_of(clusters(4, NEIGHBOURS + 1)).numpy()
    own = np.arange(len(near))[:, None]
    assert near.shape == (4 * (NEIGHBOURS + 1), NEIGHBOURS)
    assert (near // (NEIGHBOURS + 1) == own // (NEIGHBOURS + 1)).all() and (near != own).all()


def test_a_block_follows_from_its_number():
    real = clusters(4, NEIGHBOURS + 1)
    one, same, other = Grower(real).block(3, 50), Grower(real).block(3, 50), Grower(real).block(4, 50)
    assert one.dtype == np.float16 and one.shape == (50, 16)
    assert (one == same).all() and (one != other).any()
    assert np.allclose(np.linalg.norm(one.astype(np.float32), axis=1), 1, atol=2e-3)


def test_shards_have_every_row_once_in_whole_blocks():
    parts = [rows_of(number, 3, 1_000_000) for number in range(3)]
    assert [row for part in parts for row in (part.start, part.stop)] == [0, 327_680, 327_680, 655_360, 655_360, 10**6]
