"""Candidates of three kinds: each document once, as many for every text."""

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.schema import LabelConfig
from replug.data.records import Example
from replug.train.labels import SMALL, hits_of, mix_candidates

DENSE_ROWS = np.array([[3, 1], [0, 4]])
BM25_ROWS = np.array([[1, 5, 3, 6], [4, 0, 7, 1]])


def any_document(row, doc_rows):
    return np.ones(len(doc_rows), bool)


def mixed_of(dense, bm25, random=0, bm25_rows=BM25_ROWS, num_documents=10, seed=0, allowed=any_document, **given):
    wanted = LabelConfig(dense=dense, bm25=bm25, random=random)
    rows = {"dense": DENSE_ROWS, "bm25": bm25_rows, "num_documents": num_documents}
    return mix_candidates(wanted, **rows, seed=seed, allowed=allowed, **given)


def test_bm25_gives_its_best_documents_that_are_not_there_yet():
    assert mixed_of(2, 2).tolist() == [[3, 1, 5, 6], [0, 4, 7, 1]]


@pytest.mark.parametrize("num_documents", [8, SMALL + 100])
def test_random_documents_are_others_and_the_same_for_the_same_seed(num_documents):
    first, again = (mixed_of(2, 1, 3, num_documents=num_documents, seed=7) for _ in range(2))
    assert (first == again).all()
    assert all(len(set(row)) == 6 for row in first.tolist())
    other = mixed_of(2, 1, 3, num_documents=num_documents, seed=8)
    assert (first != other).any()


def test_a_texts_own_source_gives_no_candidate_by_bm25_or_chance():
    sources = {row: f"s{row % 4}" for row in range(12)}

    def allowed(row, doc_rows):
        return np.array([row == 1 or sources[doc] != "s1" for doc in doc_rows.tolist()])

    mixed = mixed_of(1, 1, 4, num_documents=12, allowed=allowed)
    assert not any(sources[row] == "s1" for row in mixed[0, 1:].tolist())


def test_too_few_of_bm25_ask_for_a_deeper_search_and_too_small_a_corpus_is_refused():
    assert mixed_of(2, 3) is None
    with pytest.raises(UserError, match="too few for 10 candidates"):
        mixed_of(2, 2, 6, num_documents=9)


def test_where_no_more_documents_share_a_word_the_next_nearest_stand_in():
    spare, bm25 = np.array([[3, 1, 8, 9], [0, 4, 5, 6]]), np.array([[1, 5, -1, -1], [-1, -1, -1, -1]])
    assert mixed_of(2, 2, bm25_rows=bm25, spare=spare).tolist() == [[3, 1, 5, 8], [0, 4, 5, 6]]


class StoredIds:
    """A corpus of the documents d0 to d9."""

    def rows_of(self, ids):
        return {name: int(name[1:]) for name in ids if name[0] == "d"}


def test_given_candidates_are_those_of_the_rows_or_of_a_run_and_too_few_or_unknown_ones_are_refused(tmp_path):
    examples = [Example("a", "x", " y", "all", candidates=("d3", "d1", "d7")), Example("b", "x", " z", "all")]
    hits = ("b Q0 d5 1 9 t", "a Q0 d4 2 1.5 t", "a Q0 d2 1 2.5 t", "b Q0 d6 2 8 t", "b Q0 gone 3 7 t")
    (tmp_path / "run.trec").write_text("\n".join(hits))

    def rows_of(hits: str, dense: int, texts: list[Example] = examples) -> list[list[int]]:
        return hits_of(LabelConfig(hits=hits, dense=dense), StoredIds(), texts).tolist()  # type: ignore[arg-type]

    assert rows_of("rows", 2, examples[:1]) == [[3, 1]]
    assert rows_of(str(tmp_path / "run.trec"), 2) == [[2, 4], [5, 6]]
    with pytest.raises(UserError, match=r"rows has 0 candidates of text b; expected label\.dense=2 or more"):
        rows_of("rows", 2)
    with pytest.raises(UserError, match="document gone of text b is not in the corpus"):
        rows_of(str(tmp_path / "run.trec"), 3, examples[1:])
