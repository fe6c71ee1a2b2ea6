"""The results of an evaluation, and the content of results.json.

    {"mmlu": {"none": {"accuracy": {"value": 0.46, "n": 285, "interval": [0.41, 0.52]}}, "replug": {...}}}

A metric by group is `metric/group`; `metric - OTHER` is the difference from another method on the same examples, with
the p-value of no difference, uncorrected (`p`) and corrected for the comparisons of the table (`p_holm`). A planned
comparison needs no correction and has no `p_holm`. `interval` is a 95% bootstrap over `clusters`, the sources of
examples, or Wilson's for shares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replug.config.methods import Method, meaningful_comparisons
from replug.evals.evidence import EvidenceBook
from replug.evals.intervals import Clusters, Interval, Ratio, difference_and_p, holm, interval_of_shares
from replug.evals.loop import Metric, Task

Entry = dict[str, Any]
Results = dict[str, dict[str, Entry]]
NO_GROUP = "no domain"  # of files outside folders and rows without one; "all" would read as the total
WITHOUT_OVERLAP, OVERLAPPING = "not in the corpus", "in the corpus"  # groups of examples


def compare(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[Method],
    seed: int = 0,
    overlapping: np.ndarray | None = None,
    question: tuple[str, str] | None = None,
    num_resamples: int = 10_000,
) -> Results:
    """Return every metric of every method, over all examples and by group, and the `meaningful_comparisons`.

    `overlapping` [N] marks the examples in the corpus; these and the others form two further groups. `question` is a
    planned comparison (other, method), which needs no correction for the others.
    """
    measured = Measurements(rows, [task.stratum(row) for row in range(len(task.examples))], seed, num_resamples)
    everything = np.arange(len(rows))
    among = {"": everything, **_groups(task, overlapping)}
    results: Results = {}
    for method in measured.numbers:
        entries = {
            f"{name}/{group}" if group else name: measured.metric(method, metric, some)
            for name, metric in task.metrics.items()
            for group, some in among.items()
        }
        results[method] = {name: entry for name, entry in entries.items() if entry is not None}
    main, metric = next(iter(task.metrics.items()))
    corrected = []
    for other, method in meaningful_comparisons([method for method in methods if method.name in results]):
        for group, some in among.items():
            name = f"{main}/{group}" if group else main
            if name in results[method] and name in results[other]:
                entry, p = measured.difference(method, other, metric, some)
                results[method][f"{name} - {other}"] = entry
                if not group:
                    entry["p"] = p
                    corrected += [entry] if (other, method) != question else []
        if task.compares_all and other == methods[0].name:
            for name, more in list(task.metrics.items())[1:]:
                results[method][f"{name} - {other}"] = measured.difference(method, other, more, everything)[0]
    correct_for_many(corrected)
    return results


def _groups(task: Task, overlapping: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the rows of each group of examples."""
    groups: dict[str, np.ndarray] = {}
    if overlapping is not None and overlapping.any() and not overlapping.all():
        groups |= {WITHOUT_OVERLAP: np.flatnonzero(~overlapping), OVERLAPPING: np.flatnonzero(overlapping)}
    members: dict[str, list[int]] = {}
    for row in range(len(task.examples)):
        for group in task.groups(row):
            name = NO_GROUP if group == "all" else group.replace(" - ", " – ")  # " - " separates two methods
            members.setdefault(name, []).append(row)
    if len(members) > 1:  # the results of a single group equal the overall results
        groups |= {group: np.array(of) for group, of in sorted(members.items())}
    return groups


def correct_for_many(entries: Sequence[Entry]) -> None:
    """Add `p_holm`, the p-value corrected for the number of entries, to each difference."""
    for entry, corrected in zip(entries, holm([entry["p"] for entry in entries]), strict=True):
        entry["p_holm"] = corrected


class Measurements:
    """The numbers of outcomes by method, and metrics of them over chosen rows.

    Examples of one `source` are a cluster. `strata` [N] names the stratum of each example (`Task.stratum`).
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], strata: Sequence[str], seed: int, num_resamples: int) -> None:
        self.numbers: dict[str, dict[str, np.ndarray]] = {}  # by method and name, [N]
        for method in rows[0]["methods"]:
            outcomes = [row["methods"][method]["numbers"] for row in rows]
            known = [name for name in outcomes[0] if all(name in outcome for outcome in outcomes)]
            self.numbers[method] = {name: np.array([of[name] for of in outcomes], dtype=np.float64) for name in known}
        self._clusters, self._seed, self._num_resamples = clusters_of(rows, strata), seed, num_resamples

    def metric(self, method: str, metric: Metric, among: np.ndarray) -> Entry | None:
        """Return a metric with its interval; None if its numbers are unknown or its denominator is 0.

        No word begins within a piece of a long word, so the number of words may be 0.
        """
        if metric.may_be_unknown and metric.numerator not in self.numbers[method]:
            return None
        ratio, clusters = self._ratio(method, metric, among), self._clusters.among(among)
        if not ratio.denominators.any():
            return None
        return _entry(interval_of_shares(ratio, self._num_resamples, self._seed, clusters), clusters)

    def difference(self, method: str, other: str, metric: Metric, among: np.ndarray) -> tuple[Entry, float]:
        """Return a method's difference from another with its interval, and the p-value of no difference."""
        a, b = (self._ratio(name, metric, among) for name in (method, other))
        clusters = self._clusters.among(among)
        interval, p = difference_and_p(a, b, self._num_resamples, self._seed, clusters)
        return _entry(interval, clusters), p

    def _ratio(self, method: str, metric: Metric, among: np.ndarray) -> Ratio:
        of = self.numbers[method]
        numerators = of[metric.numerator]
        denominators = np.ones_like(numerators) if metric.denominator is None else of[metric.denominator]
        return Ratio(numerators[among], denominators[among], metric.transform)


def clusters_of(rows: Sequence[Mapping[str, Any]], strata: Sequence[str] | None = None) -> Clusters:
    """Return the clusters of examples by source; an example without a source is a separate cluster."""
    names: list[str | int] = [row.get("source") or number for number, row in enumerate(rows)]
    return Clusters.by_name(names, strata)


def _entry(interval: Interval, clusters: Clusters) -> Entry:
    n = len(clusters.of_example)
    entry = {"value": interval.value, "n": n, "interval": [interval.low, interval.high]}
    return entry if len(clusters) == n else {**entry, "clusters": len(clusters)}


def num_clusters(entry: Entry) -> int:
    """Return the number of clusters of an entry: of its sources, or else of its examples."""
    return entry["clusters"] if "clusters" in entry else entry["n"]


def add_temperatures(results: Results, book: EvidenceBook, num_examples: int) -> None:
    """Add the entry `temperature` to weighted methods, if any differs from the paper's, 1."""
    temperatures = {method.name: book.temperature(method) for method in book.methods if method.is_weighted}
    if any(value != 1 for value in temperatures.values()):
        for name, value in temperatures.items():
            results[name]["temperature"] = {"value": value, "n": num_examples, "interval": [value, value]}


def main_metric(results: Results) -> str:
    """Return the metric by which methods are compared."""
    return next(iter(next(iter(results.values()))))
