"""Retrieval alone: how often the gold documents of a question are found. No LM takes part."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replug.evals.evidence import Evidence
from replug.evals.examples import Example
from replug.evals.loop import Metric, Outcome, Outcomes
from replug.evals.retrieval import RANKED_AT, RECALL_AT, retrieval_metrics

_NAMES = [
    *(f"Success@{k}" for k in RECALL_AT),
    *(f"R@{k}" for k in RECALL_AT),
    f"RR@{RANKED_AT}",
    f"nDCG@{RANKED_AT}",
]


class Retrieval:
    """A `Task`. `gold` are the rows of each example's gold documents."""

    metrics: Mapping[str, Metric] = {("M" if name.startswith("RR") else "") + name: Metric(name) for name in _NAMES}

    def __init__(self, examples: Sequence[Example], gold: Sequence[set[int]]) -> None:
        self.examples, self._gold = list(examples), gold

    def groups(self, example: Example) -> tuple[str, ...]:
        return (example.group,)

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        found = np.array([one.doc_rows for one in evidence.values()])
        values = retrieval_metrics(found, [self._gold[row]] * len(found))
        outcomes = {
            name: Outcome({metric: float(of[place]) for metric, of in values.items()})
            for place, name in enumerate(evidence)
        }
        return lambda: outcomes
