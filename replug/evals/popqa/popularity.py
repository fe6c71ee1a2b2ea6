"""How answers depend on the popularity of what is asked about (Mallen et al. 2023, sections 4 and 5). Pure.

Popularity is a count: monthly page views of the subject in PopQA, documents that name it elsewhere.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

PAGE_VIEWS, DOCUMENTS = "s_pop", "corpus"  # what popularity counts, as outcomes say it in `popularity_from`


def popularity_bin(popularity: float) -> str:
    """The power of ten it lies in, as `popularity 10^2-10^3`, whose lower end belongs to it; 0 has a bin of its own."""
    if popularity < 1:
        return "popularity 0"
    power = len(str(int(popularity))) - 1  # a logarithm may round 1,000 down
    return f"popularity 10^{power}-10^{power + 1}"


def popularity_correlation(popularity: np.ndarray, right: np.ndarray) -> float | None:
    """Pearson's correlation of being right with log10 of popularity, both [N]; a popularity below 1 counts as 1.

    None where one of the two is the same for all questions, so that there is no correlation.
    """
    logs = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0))
    right = np.asarray(right, dtype=np.float64)
    if len(logs) < 2 or np.ptp(logs) == 0 or np.ptp(right) == 0:
        return None
    deviations = logs - logs.mean(), right - right.mean()
    return float(
        (deviations[0] @ deviations[1]) / math.sqrt((deviations[0] @ deviations[0]) * (deviations[1] @ deviations[1]))
    )


def relative_popularity(popularity: np.ndarray, relations: Sequence[str]) -> np.ndarray:
    """Log10 popularity [N] less its relation's mean, in the relation's standard deviations (figure 7).

    A popularity below 1 counts as 1. 0 for a relation whose questions are all equally popular.
    """
    logs, names = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0)), np.asarray(relations)
    relative = np.zeros(len(logs))
    for relation in set(relations):
        own = names == relation
        if np.ptp(logs[own]) > 0:
            relative[own] = (logs[own] - logs[own].mean()) / logs[own].std()
    return relative


def most_frequent(answers: Sequence[str]) -> str:
    """The first of those that occur most often."""
    return Counter(answers).most_common(1)[0][0]
