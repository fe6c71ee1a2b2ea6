"""Exact search against brute force in float64, to the last bit; answers leave out a source, and are compared."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.index_workers import exact_search
from replug.index_workers.exact_search import (
    BlockVectors,
    CopiedVectors,
    ExactShard,
    SplitQueries,
    merge_top_k,
    search_excluding,
    top_k_overlap,
)

DIM, BLOCK = 16, 32
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((300, DIM)).astype(np.float16)
QUERIES = RNG.standard_normal((24, DIM)).astype(np.float32)


def shard_of(vectors: np.ndarray, block: int = BLOCK, first_row: int = 0) -> ExactShard:
    blocks = [vectors[start : start + block] for start in range(0, len(vectors), block)]
    return ExactShard(BlockVectors(first_row, blocks, DIM), torch.device("cpu"))


def brute_force(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    similarities = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    rows = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(similarities, rows, axis=1)


def assert_same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize(("block", "chunk_rows"), [(1, 64), (7, 1), (299, 64), (1000, 16_384)])
def test_the_answer_is_that_of_brute_force_however_the_vectors_are_cut(monkeypatch, block, chunk_rows) -> None:
    monkeypatch.setattr(exact_search, "CHUNK_ROWS", chunk_rows)
    queries = QUERIES[:4]
    assert_same(shard_of(VECTORS, block).search(queries, 9), brute_force(VECTORS, queries, 9))


def test_thousands_of_equal_documents_come_in_the_order_of_their_rows_in_little_time() -> None:
    """More than any margin of candidates; and as many of another kind that some queries like better."""
    vectors = np.repeat(VECTORS[:2], 6_000, axis=0)
    assert_same(shard_of(vectors, block=1000).search(QUERIES, 20), brute_force(vectors, QUERIES, 20))


@pytest.mark.parametrize("rows", [1_000, 64])
def test_vectors_that_were_copied_are_searched_without_their_files(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """And so many rows at a time that their products fit the memory that a search may take."""
    monkeypatch.setattr(exact_search, "PRODUCTS_GPU", rows * len(QUERIES))
    monkeypatch.setattr(exact_search, "MappedVectors", lambda vectors: CopiedVectors(vectors, torch.device("cpu")))
    vectors = VECTORS.copy()
    shard = shard_of(vectors, first_row=1000)
    vectors[:] = np.nan  # what the files hold now
    rows, similarities = shard.search(QUERIES, 9)
    assert_same((rows - 1000, similarities), brute_force(VECTORS, QUERIES, 9))


@given(st.lists(st.integers(0, len(QUERIES) - 1), min_size=1, max_size=80), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(batch: list[int], k: int) -> None:
    shard = shard_of(VECTORS)
    alone = shard.search(QUERIES[batch[0]][None], k)
    rows, similarities = shard.search(QUERIES[batch], k)
    assert_same((rows[:1], similarities[:1]), alone)


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_answer_does_not_depend_on_the_number_of_shards(cuts: list[int], k: int, has_ties: bool) -> None:
    vectors, queries = (np.sign(of) if has_ties else of for of in (VECTORS, QUERIES))
    bounds = sorted({0, *(cut * BLOCK for cut in cuts), len(vectors)})
    shards = [shard_of(vectors[a:b], first_row=a) for a, b in itertools.pairwise(bounds)]
    for order in (shards, shards[::-1]):
        assert_same(merge_top_k([one.search(queries, k) for one in order], k), brute_force(vectors, queries, k))


def test_nearly_equal_similarities_are_ordered_by_what_float32_products_would_lose() -> None:
    """Large halves that cancel: a float32 sum forgets the small part that decides."""
    vectors = np.zeros((6, DIM), dtype=np.float16)
    vectors[:, 0], vectors[:, 1] = 60_000, -60_000
    vectors[:, 2] = np.array([3, 5, 1, 6, 2, 4]) / 2048
    query = np.ones((1, DIM), dtype=np.float32)
    rows, similarities = shard_of(vectors).search(query, 6)
    assert rows.tolist() == [[3, 1, 5, 0, 4, 2]]
    assert similarities.tolist() == [[value / 2048 for value in (6, 5, 4, 3, 2, 1)]]


def test_a_long_document_among_short_ones_is_not_lost_to_rounding() -> None:
    """Its float32 product is 0 and no candidate's, though it is the largest."""
    vectors = np.zeros((400, DIM), dtype=np.float16)
    vectors[:, 1] = (100 + RNG.permutation(400)) / 2**20
    vectors[7, :3] = 60_000, 3 / 2048, -60_000
    query = np.ones((1, DIM), dtype=np.float32)
    assert_same(shard_of(vectors).search(query, 5), brute_force(vectors, query, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("copies", [1, 500])
def test_a_gpu_gives_the_same_bits(copies: int) -> None:
    vectors = np.repeat(VECTORS, copies, axis=0)
    blocks = [vectors[start : start + BLOCK] for start in range(0, len(vectors), BLOCK)]
    on_gpu = ExactShard(BlockVectors(0, blocks, DIM), torch.device("cuda"))
    assert_same(on_gpu.search(QUERIES, 20), shard_of(vectors).search(QUERIES, 20))


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("length", [1e-6, 1.0, 3e7])
def test_two_float16_halves_are_as_exact_as_float32(length: float) -> None:
    vectors = torch.randn(300, 768, generator=GENERATOR).half()
    queries = torch.randn(5, 768, generator=GENERATOR) * length
    queries[0] = 0
    queries[1, :4] *= 1e4  # few large numbers, which leave the others few bits in float16
    products = SplitQueries(queries).products(vectors).double()
    exact = vectors.double() @ queries.double().T
    lengths = vectors.double().norm(dim=1)[:, None] * queries.double().norm(dim=1)
    assert ((products - exact).abs() <= 1e-6 * lengths).all()
    in_float16 = vectors.double() @ queries[2:].div(length).half().double().T * length
    assert ((in_float16 - exact[:, 2:]).abs() / lengths[:, 2:]).max() > 1e-5  # one half alone would not do


# Answers that leave out a source --------------------------------------------------------------------------------------

SIMILARITIES = RNG.standard_normal((3, 120)).astype(np.float32)
SOURCES = np.array([f"s{i}" for i in RNG.integers(6, size=120)])


def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The search of an index over rows whose similarities are given."""
    rows = np.argsort(-SIMILARITIES, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(SIMILARITIES, rows, axis=1)


def sources_of(names: np.ndarray) -> Callable[[np.ndarray], list[str]]:
    return lambda rows: names[rows].tolist()


def test_every_query_gets_its_best_documents_of_other_sources() -> None:
    exclude = ["s1", None, "s5"]
    rows, similarities = search_excluding(search, sources_of(SOURCES), QUERIES[:3], 10, exclude, 10)
    for query, source in enumerate(exclude):
        order = np.argsort(-SIMILARITIES[query], kind="stable")
        assert rows[query].tolist() == [row for row in order if SOURCES[row] != source][:10]
        np.testing.assert_array_equal(similarities[query], SIMILARITIES[query, rows[query]])


def test_where_the_corpus_has_fewer_than_k_all_that_there_is_will_do_if_it_is_enough() -> None:
    names = np.array(["own"] * 111 + ["other"] * 9)
    exclude = ["own", None, "own"]
    rows, similarities = search_excluding(search, sources_of(names), QUERIES[:3], 30, exclude, at_least=9)
    assert rows.shape == similarities.shape == (3, 9)
    assert [sorted(rows[query]) for query in (0, 2)] == [list(range(111, 120))] * 2
    np.testing.assert_array_equal(rows[1], search(QUERIES[:3], 9)[0][1])
    np.testing.assert_array_equal(similarities, np.take_along_axis(SIMILARITIES, rows, axis=1))
    with pytest.raises(ValueError, match=r"^the corpus has fewer than 10 documents that are not of source own$"):
        search_excluding(search, sources_of(names), QUERIES[:3], 30, exclude, at_least=10)


def test_the_overlap_is_the_mean_share_of_documents_in_both_answers_whatever_their_order() -> None:
    rows = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    others = np.array([[4, 3, 2, 1], [1, 2, 8, 9], [6, 7, 8, 9]])
    assert top_k_overlap(rows, others) == pytest.approx((1 + 0.5 + 0) / 3)
