"""How well a signal tells right answers from wrong ones: the area under the ROC curve. Pure."""

import numpy as np


def auroc(values: np.ndarray, is_right: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """The chance that a right answer has a higher value than a wrong one; equal values count half.

    `values` [N] and `is_right` [N]; `counts` [B, N] say how often each question is drawn in B resamples, and without
    them each is there once. Returns [B], NaN where all answers are right or none is.
    """
    counts = np.ones((1, len(values))) if counts is None else np.asarray(counts, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    ordered, right = values[order], np.asarray(is_right, dtype=bool)[order]
    drawn = counts[:, order]
    wrong_before = np.zeros((len(drawn), len(values) + 1))
    np.cumsum(drawn * ~right, axis=1, out=wrong_before[:, 1:])
    below = wrong_before[:, np.searchsorted(ordered, ordered, side="left")]
    up_to = wrong_before[:, np.searchsorted(ordered, ordered, side="right")]
    pairs = (drawn * right).sum(axis=1) * wrong_before[:, -1]
    won = (drawn * right * (below + up_to)).sum(axis=1) / 2
    return np.divide(won, pairs, out=np.full(len(drawn), np.nan), where=pairs > 0)
