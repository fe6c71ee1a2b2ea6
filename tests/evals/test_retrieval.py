"""Retrieval measures by `ir-measures`, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from replug.evals.retrieval import gold_rows, retrieval_metrics

FOUND = np.array([np.arange(20) + 100 * query for query in range(5)])  # query q finds 100 q, 100 q + 1, ...
GOLD = [{0}, {102, 107, 9_999}, {219}, {400}, set()]  # first; third and eighth of three; last; never; none


def test_every_query_has_its_own_value_of_every_measure() -> None:
    values = retrieval_metrics(FOUND, GOLD)
    assert set(values) == {"Success@1", "Success@5", "Success@20", "R@1", "R@5", "R@20", "RR@10", "nDCG@10"}
    assert values["Success@1"].tolist() == [1, 0, 0, 0, 0]
    assert values["Success@5"].tolist() == [1, 1, 0, 0, 0]
    assert values["Success@20"].tolist() == [1, 1, 1, 0, 0]
    assert values["R@1"].tolist() == [1, 0, 0, 0, 0]
    assert values["R@5"] == pytest.approx([1, 1 / 3, 0, 0, 0])
    assert values["R@20"] == pytest.approx([1, 2 / 3, 1, 0, 0])
    assert values["RR@10"] == pytest.approx([1, 1 / 3, 0, 0, 0])  # the last is at rank 20
    gain = 1 / math.log2(4) + 1 / math.log2(9)  # ranks 3 and 8
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert values["nDCG@10"] == pytest.approx([1, gain / ideal, 0, 0, 0])


def test_success_is_the_recall_of_any_gold_document_and_recall_is_the_share_of_them() -> None:
    rng = np.random.default_rng(0)
    found = np.stack([rng.permutation(60)[:20] for _ in range(200)])
    gold = [set(rng.choice(60, size=rng.integers(1, 4), replace=False).tolist()) for _ in range(200)]
    values = retrieval_metrics(found, gold)
    for k in (1, 5, 20):
        hits = [bool(rows & set(found[i, :k].tolist())) for i, rows in enumerate(gold)]
        assert values[f"Success@{k}"].tolist() == hits
        shares = [len(rows & set(found[i, :k].tolist())) / len(rows) for i, rows in enumerate(gold)]
        assert values[f"R@{k}"] == pytest.approx(shares)
    one = [{min(rows)} for rows in gold]
    values = retrieval_metrics(found, one)
    np.testing.assert_array_equal(values["Success@5"], values["R@5"])


def test_gold_documents_that_are_not_in_the_corpus_count_and_are_never_found_among_a_few_rows() -> None:
    gold = gold_rows([["a", "gone", "lost", "a"], ["gone"], []], {"a": 3, "b": 5})
    assert gold[0] == {3, -2, -3} and gold[1] == {-1} and gold[2] == set()
    values = retrieval_metrics(np.array([[3], [5], [3]]), gold)
    assert values["R@1"] == pytest.approx([1 / 3, 0, 0])
    assert values["Success@20"].tolist() == [1, 0, 0]
