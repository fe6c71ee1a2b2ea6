"""From the outcomes of an evaluation to `results.json`, a table and a figure.

`results.json` maps method -> metric -> {"value", "n", "interval"}, with `paper`, the paper's figure, where it is known.
A metric by group is `metric/group`; `metric - OTHER` is the difference from another method on the same examples, and
`metric/group - OTHER` on those of a group. Intervals are 95% of a bootstrap over examples, and Wilson's for shares.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replug.configs.plain_text import plain_line
from replug.configs.schema import PaperConfig
from replug.evals.examples import Example
from replug.evals.intervals import Interval, Ratio, difference_interval, interval_of_shares, value_of, verdict
from replug.evals.loop import Measured, Metric

Entry = dict[str, Any]
Results = dict[str, dict[str, Entry]]
Numbers = dict[str, np.ndarray]  # by name, of one method, [N]
MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<!\w)_|_(?!\w)")  # of Markdown; an underscore within a word is none
MIN_GROUPS = 2  # of one group alone, the figures of the group are those of all


def compare(
    task: Measured, rows: Sequence[Mapping[str, Any]], paper: PaperConfig, num_resamples: int, seed: int
) -> Results:
    """Every metric of every method, by group too, and how each method differs from those before it."""
    measured = Measurements(rows, num_resamples, seed)
    among = {"": measured.all, **_members(task, task.examples)}
    results: Results = {
        method: {
            f"{name}/{group}" if group else name: measured.metric(method, metric, some)
            for name, metric in task.metrics.items()
            if measured.tells(method, metric)
            for group, some in among.items()
        }
        for method in measured.numbers
    }
    main, metric = next(iter(task.metrics.items()))
    for (other, method), (group, some) in itertools.product(itertools.combinations(results, 2), among.items()):
        name = f"{main}/{group}" if group else main
        results[method][f"{name} - {other}"] = measured.difference(method, other, metric, some)
    for method in results.keys() & paper.values.keys():
        results[method][main]["paper"] = paper.values[method]
    return results


class Measurements:
    """The outcomes' numbers by method, and what a metric makes of them over some examples, by their rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], num_resamples: int = 10_000, seed: int = 0) -> None:
        self.numbers = {method: _numbers(rows, method) for method in rows[0]["methods"]}
        self.all = np.arange(len(rows))
        self._num_resamples, self._seed = num_resamples, seed

    def tells(self, method: str, metric: Metric) -> bool:
        """Whether a method's outcomes have the metric's number, which only some metrics may lack."""
        return metric.numerator in self.numbers[method] or not metric.may_be_unknown

    def value(self, method: str, metric: Metric, among: np.ndarray) -> float:
        """Without its interval."""
        return value_of(self._ratio(method, metric, among))

    def metric(self, method: str, metric: Metric, among: np.ndarray) -> Entry:
        """With its interval."""
        ratio = self._ratio(method, metric, among)
        return _entry(interval_of_shares(ratio, self._num_resamples, self._seed), len(among))

    def difference(self, method: str, other: str, metric: Metric, among: np.ndarray) -> Entry:
        """Of a method from another, with its interval."""
        a, b = (self._ratio(name, metric, among) for name in (method, other))
        return _entry(difference_interval(a, b, self._num_resamples, self._seed), len(among))

    def _ratio(self, method: str, metric: Metric, among: np.ndarray) -> Ratio:
        of = self.numbers[method]
        denominators = np.ones(len(self.all)) if metric.denominator is None else of[metric.denominator]
        return Ratio(of[metric.numerator][among], denominators[among], metric.transform)


def _entry(interval: Interval, n: int) -> Entry:
    return {"value": interval.value, "n": n, "interval": [interval.low, interval.high]}


def _numbers(rows: Sequence[Mapping[str, Any]], method: str) -> Numbers:
    """Those that every example has: what is not known of an example is not in its row."""
    outcomes = [row["methods"][method]["numbers"] for row in rows]
    known = [name for name in outcomes[0] if all(name in outcome for outcome in outcomes)]
    return {name: np.array([outcome[name] for outcome in outcomes], dtype=np.float64) for name in known}


def _members(task: Measured, examples: Sequence[Example]) -> dict[str, np.ndarray]:
    """Rows of each group, none where there is only one."""
    members: dict[str, list[int]] = {}
    for row, example in enumerate(examples):
        for group in task.groups(example):
            members.setdefault(group.replace(" - ", " – "), []).append(row)  # " - " is ours, between two methods
    if len(members) < MIN_GROUPS:
        return {}
    return {group: np.array(rows) for group, rows in sorted(members.items())}


def main_metric(results: Results) -> str:
    """The metric that methods are compared by."""
    return next(iter(next(iter(results.values()))))


def markdown_table(results: Results, title: str, paper_table: str | None = None) -> str:
    """Methods down, metrics over all examples across, with intervals of the first metric, and the differences below.

    Where the paper's figures are known they stand in the last column.
    """
    named = dict.fromkeys(name for of in results.values() for name in of)
    metrics = [name for name in named if "/" not in name and " - " not in name]
    main = metrics[0]
    has_paper = any("paper" in of[main] for of in results.values())
    n = next(iter(results.values()))[main]["n"]
    head = ["method", main, "95% interval", *metrics[1:], *([f"paper, {paper_table}"] if has_paper else [])]
    lines = [f"{title}, n = {n}", "", markdown_line(head), markdown_line(["---"] * len(head))]
    for method, of in results.items():
        low, high = of[main]["interval"]
        paper = [f"{of[main]['paper']:g}" if "paper" in of[main] else ""] if has_paper else []
        others = [f"{of[name]['value']:.4g}" if name in of else "" for name in metrics[1:]]
        lines.append(markdown_line([method, f"{of[main]['value']:.4f}", f"{low:.4f} to {high:.4f}", *others, *paper]))
    return "\n".join([*lines, "", *_difference_lines(results), *_group_lines(results, main)]) + "\n"


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table. A cell is text, whatever it holds: groups are called as the data has them."""
    return f"| {' | '.join(map(markdown_text, cells))} |"


def markdown_text(text: str) -> str:
    """On one line, shown as it is by what reads Markdown, and by a terminal."""
    return MARKUP.sub(r"\\\g<0>", plain_line(text))


def difference_text(entry: Entry) -> str:
    """A difference with its interval, and what that allows one to say."""
    low, high = entry["interval"]
    return f"{entry['value']:+.4f} ({low:+.4f} to {high:+.4f}: {verdict(low, high)})"


def _difference_lines(results: Results) -> list[str]:
    lines = []
    for method, of in results.items():
        for name, entry in of.items():
            metric, separator, other = name.partition(" - ")
            if separator and "/" not in metric:
                lines.append(f"- {metric} of {method} − {other}: {difference_text(entry)}")
    return lines


def _group_lines(results: Results, main: str) -> list[str]:
    groups = [name for name in next(iter(results.values())) if name.startswith(f"{main}/") and " - " not in name]
    if not groups:
        return []
    head = [main, "n", *results]
    rows = [
        [name.removeprefix(f"{main}/"), str(next(iter(results.values()))[name]["n"])]
        + [f"{of[name]['value']:.4f}" for of in results.values()]
        for name in groups
    ]
    return ["", markdown_line(head), markdown_line(["---"] * len(head)), *map(markdown_line, rows)]
