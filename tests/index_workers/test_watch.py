"""What a refresh is measured by, on numbers made by hand."""

import numpy as np
import pytest

from replug.index_workers.answers import mean_drift, sample_rows, top_k_overlap


def test_the_overlap_is_the_mean_share_of_documents_in_both_answers_whatever_their_order() -> None:
    rows = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    others = np.array([[4, 3, 2, 1], [1, 2, 8, 9], [6, 7, 8, 9]])
    assert top_k_overlap(rows, others) == pytest.approx((1 + 0.5 + 0) / 3)


def test_the_drift_is_one_minus_the_cosine_whatever_the_lengths() -> None:
    before = np.array([[1, 0], [0, 2], [3, 0], [1, 1]], dtype=np.float16)
    after = np.array([[5, 0], [0, -1], [0, 1], [1, 1]], dtype=np.float16)
    assert mean_drift(before, before) == pytest.approx(0, abs=1e-12)
    assert mean_drift(before, after) == pytest.approx((0 + 2 + 1 + 0) / 4)


def test_vectors_whose_squares_float16_cannot_hold_are_compared_all_the_same() -> None:
    large = np.full((2, 3), 60_000, dtype=np.float16)
    assert mean_drift(large, large) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("documents", "at_most", "rows"), [(5, 9, [0, 1, 2, 3, 4]), (9, 3, [0, 4, 8]), (1, 9, [0])])
def test_the_sample_is_spread_evenly_and_never_more_than_there_is(documents: int, at_most: int, rows: list) -> None:
    assert sample_rows(documents, at_most).tolist() == rows
