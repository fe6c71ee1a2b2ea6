"""Answers leave out a source, and are compared before and after a refresh."""

from collections.abc import Callable

import numpy as np
import pytest

from replug.index_workers.exact_search import search_excluding, top_k_overlap

RNG = np.random.default_rng(0)
SIMILARITIES = RNG.standard_normal((3, 120)).astype(np.float32)
SOURCES = np.array([f"s{i}" for i in RNG.integers(6, size=120)])


def searching(similarities: np.ndarray, asked: list[int] | None = None) -> Callable:
    """An index over rows whose similarities are given; notes how many documents are asked for."""

    def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if asked is not None:
            asked.append(k)
        rows = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
        return rows, np.take_along_axis(similarities, rows, axis=1)

    return search


def sources_of(names: np.ndarray) -> Callable[[np.ndarray], list[str]]:
    return lambda rows: [str(names[row]) for row in rows]


QUERIES = np.zeros((3, 4), dtype=np.float32)


def test_every_query_gets_its_best_documents_of_other_sources() -> None:
    exclude = ["s1", None, "s5"]
    rows, similarities = search_excluding(searching(SIMILARITIES), sources_of(SOURCES), QUERIES, 10, exclude, 10)
    for query, source in enumerate(exclude):
        order = np.argsort(-SIMILARITIES[query], kind="stable")
        assert rows[query].tolist() == [row for row in order if SOURCES[row] != source][:10]
        np.testing.assert_array_equal(similarities[query], SIMILARITIES[query, rows[query]])


def test_where_the_corpus_has_fewer_than_k_all_that_there_is_will_do_if_it_is_enough() -> None:
    names = np.array(["own"] * 111 + ["other"] * 9)
    search, exclude = searching(SIMILARITIES), ["own", None, "own"]
    rows, similarities = search_excluding(search, sources_of(names), QUERIES, 30, exclude, at_least=9)
    assert rows.shape == similarities.shape == (3, 9)
    assert [sorted(rows[query]) for query in (0, 2)] == [list(range(111, 120))] * 2
    np.testing.assert_array_equal(rows[1], search(QUERIES, 9)[0][1])
    np.testing.assert_array_equal(similarities, np.take_along_axis(SIMILARITIES, rows, axis=1))
    with pytest.raises(ValueError, match=r"^the corpus has fewer than 10 documents that are not of source own$"):
        search_excluding(search, sources_of(names), QUERIES, 30, exclude, at_least=10)


def test_the_overlap_is_the_mean_share_of_documents_in_both_answers_whatever_their_order() -> None:
    rows = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    others = np.array([[4, 3, 2, 1], [1, 2, 8, 9], [6, 7, 8, 9]])
    assert top_k_overlap(rows, others) == pytest.approx((1 + 0.5 + 0) / 3)
