"""The results of an evaluation, and the content of results.json.

    {"mmlu": {"none": {"accuracy": {"value": 0.46, "n": 285, "interval": [0.41, 0.52]}}, "replug": {...}}}

A metric by group is `metric/group`; `metric - OTHER` is the difference from another method on the same examples, with
the p-value of no difference, uncorrected (`p`) and corrected for the comparisons of the table (`p_holm`). A planned
comparison needs no correction and has no `p_holm`. `interval` is a 95% bootstrap over `clusters`, the sources of
examples, or Wilson's for shares. `paper` is the paper's figure: with another LM, other texts or another corpus, only
the signs of gains are comparable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig, PaperConfig
from replug.config.methods import Method, meaningful_comparisons
from replug.evals.evidence import EvidenceBook
from replug.evals.intervals import Clusters, Interval, Ratio, difference_and_p, holm, interval_of_shares
from replug.evals.loop import Metric, Task

Entry = dict[str, Any]
Results = dict[str, dict[str, Entry]]
NO_GROUP = "no domain"  # of files outside folders and rows without one; "all" would read as the total
WITHOUT_OVERLAP, OVERLAPPING = "not in the corpus", "in the corpus"  # groups of examples
MIN_GROUPS = 2  # with one group, its results equal the overall results


def compare(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[Method],
    paper: PaperConfig,
    num_resamples: int,
    seed: int,
    overlapping: np.ndarray | None = None,
    question: tuple[str, str] | None = None,
) -> Results:
    """Return every metric of every method, over all examples and by group, and the `meaningful_comparisons`.

    `overlapping` [N] marks the examples in the corpus; these and the others form two further groups. `question` is a
    planned comparison (other, method), which needs no correction for the others.
    """
    strata = [task.stratum(row) for row in range(len(task.examples))]
    measured = Measurements(rows, num_resamples, seed, strata)
    among = {"": measured.all, **_groups(task, overlapping)}
    results: Results = {
        method: {
            f"{name}/{group}" if group else name: measured.metric(method, metric, some)
            for name, metric in task.metrics.items()
            for group, some in among.items()
            if measured.tells(method, metric, some)
        }
        for method in measured.numbers
    }
    main, metric = next(iter(task.metrics.items()))
    corrected = []
    for other, method in meaningful_comparisons([method for method in methods if method.name in results]):
        for group, some in among.items():
            name = f"{main}/{group}" if group else main
            if name in results[method] and name in results[other]:
                entry = measured.difference(method, other, metric, some)
                results[method][f"{name} - {other}"] = entry
                if group:
                    entry.pop("p")
                elif (other, method) != question:
                    corrected.append(entry)
        if task.compares_all and other == methods[0].name:
            for name, more in list(task.metrics.items())[1:]:
                entry = measured.difference(method, other, more, measured.all)
                entry.pop("p")
                results[method][f"{name} - {other}"] = entry
    correct_for_many(corrected)
    for group, values in {"": paper.values, **paper.groups}.items():
        name = paper_metric(results, main, group)
        for method in results.keys() & values.keys():
            if name in results[method]:
                results[method][name]["paper"] = values[method]
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
    if len(members) >= MIN_GROUPS:
        groups |= {group: np.array(of) for group, of in sorted(members.items())}
    return groups


def paper_metric(results: Results, main: str, group: str) -> str:
    """Return the metric of a paper's figures for a group: the metric of that name, or else the main one by group."""
    return group if any(group in of for of in results.values()) else f"{main}/{group}" if group else main


def paper_of_dataset(config: EvaluationConfig) -> PaperConfig:
    """Return the paper's figures for the evaluated data set.

    The group `nq` has the figures of the set's main metric, `nq METRIC` the figures of another metric.
    """
    paper, dataset = config.paper, config.questions.dataset
    own = {name: values for name, values in paper.groups.items() if dataset and name.split()[0] == dataset}
    if not own:
        return paper
    assert dataset is not None
    of_metrics = {name.removeprefix(dataset).strip(): values for name, values in own.items()}
    return replace(paper, values=of_metrics.pop("", {}), groups=of_metrics)


def correct_for_many(entries: Sequence[Entry]) -> None:
    """Add `p_holm`, the p-value corrected for the number of entries, to each difference."""
    for entry, corrected in zip(entries, holm([entry["p"] for entry in entries]), strict=True):
        entry["p_holm"] = corrected


class Measurements:
    """The numbers of outcomes by method, and metrics of them over chosen rows.

    Examples of one `source` are a cluster. `strata` [N] names the stratum of each example (`Task.stratum`).
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        num_resamples: int = 10_000,
        seed: int = 0,
        strata: Sequence[str] | None = None,
    ) -> None:
        self.numbers: dict[str, dict[str, np.ndarray]] = {}  # by method and name, [N]
        for method in rows[0]["methods"]:
            outcomes = [row["methods"][method]["numbers"] for row in rows]
            known = [name for name in outcomes[0] if all(name in outcome for outcome in outcomes)]
            self.numbers[method] = {name: np.array([of[name] for of in outcomes], dtype=np.float64) for name in known}
        self.all = np.arange(len(rows))
        self.clusters = clusters_of(rows, strata)
        self._num_resamples, self._seed = num_resamples, seed

    def tells(self, method: str, metric: Metric, among: np.ndarray) -> bool:
        """Return whether a metric is defined for a method: its numbers are known, and the denominator is not 0.

        No word begins within a piece of a long word, so the number of words may be 0.
        """
        if metric.may_be_unknown and metric.numerator not in self.numbers[method]:
            return False
        return metric.denominator is None or bool(self.numbers[method][metric.denominator][among].any())

    def metric(self, method: str, metric: Metric, among: np.ndarray) -> Entry:
        """Return a metric with its interval."""
        ratio, clusters = self._ratio(method, metric, among), self.clusters.among(among)
        return _entry(interval_of_shares(ratio, self._num_resamples, self._seed, clusters), clusters)

    def difference(self, method: str, other: str, metric: Metric, among: np.ndarray) -> Entry:
        """Return a method's difference from another, with its interval and the p-value of no difference."""
        a, b = (self._ratio(name, metric, among) for name in (method, other))
        clusters = self.clusters.among(among)
        interval, p = difference_and_p(a, b, self._num_resamples, self._seed, clusters)
        return {**_entry(interval, clusters), "p": p}

    def _ratio(self, method: str, metric: Metric, among: np.ndarray) -> Ratio:
        of = self.numbers[method]
        denominators = np.ones(len(self.all)) if metric.denominator is None else of[metric.denominator]
        return Ratio(of[metric.numerator][among], denominators[among], metric.transform)


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


def add_effective_documents(results: Results, book: EvidenceBook, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add the mean `effective_documents` to methods that mix several documents; near k, weights are almost equal."""
    for method in book.methods:
        mixes = method.takes_from_corpus and method.num_read > 1 and not method.is_concatenated
        if mixes and method.name in results:
            details = [row["methods"][method.name]["detail"].get("final_weights") for row in rows]
            effective = [book.num_effective(method, row, final) for row, final in enumerate(details)]
            results[method.name]["effective_documents"] = {"value": float(np.mean(effective)), "n": len(rows)}


def main_metric(results: Results) -> str:
    """Return the metric by which methods are compared."""
    return next(iter(next(iter(results.values()))))
