"""From the outcomes of an evaluation to `results.json`, a table and a figure.

`results.json` maps method -> metric -> {"value", "n", "interval"}, with `paper`, the paper's figure, where it is known.
A metric by group is `metric/group`; `metric - OTHER` is the difference from another method on the same examples, and
`metric/group - OTHER` on those of a group. Intervals are 95% of a bootstrap over clusters, which are the sources of
examples, and Wilson's for shares. `clusters` says how many there are, where they are fewer than examples. Differences
over all examples have `p` of no difference and `p_holm`, corrected for all comparisons of the table.

A paper's figures beside ours: by method with the gain in percent, by group, and those of others in the same table.

They are of the paper's LM, texts and corpus. Where ours are others, the two columns compare nothing but the sign of
the gains. Pure.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.evaluation_schema import PaperConfig
from replug.config.methods import NONE
from replug.config.plain_text import plain_line
from replug.evals.intervals import (
    FEW_CLUSTERS,
    LEVEL,
    Clusters,
    Interval,
    Ratio,
    difference_and_p,
    holm,
    interval_of_shares,
    value_of,
    verdict,
    wilson_interval,
)
from replug.evals.loop import Measured, Metric, StratifiedTask

Entry = dict[str, Any]
Results = dict[str, dict[str, Entry]]
MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<!\w)_|_(?!\w)")  # of Markdown; an underscore within a word is none
MOST_DIFFERENCES = 20  # that are listed whatever they show; more hide the few that show something
WITHOUT_OVERLAP, OVERLAPPING = "not in the corpus", "in the corpus"  # groups: what of examples the corpus holds
MIN_GROUPS = 2  # of one group alone, the figures of the group are those of all


def compare(
    task: Measured,
    rows: Sequence[Mapping[str, Any]],
    paper: PaperConfig,
    num_resamples: int,
    seed: int,
    overlapping: np.ndarray | None = None,
) -> Results:
    """Every metric of every method, by group too, and how each method differs from those before it.

    `overlapping` [N] says which examples the corpus holds: figures of the others, and of these, are groups.
    """
    strata = [task.stratum(example) for example in task.examples] if isinstance(task, StratifiedTask) else None
    measured = Measurements(rows, num_resamples, seed, strata)
    among = {"": measured.all}
    if overlapping is not None and overlapping.any() and not overlapping.all():
        among |= {WITHOUT_OVERLAP: np.flatnonzero(~overlapping), OVERLAPPING: np.flatnonzero(overlapping)}
    members: dict[str, list[int]] = {}
    for row, example in enumerate(task.examples):
        for group in task.groups(example):
            members.setdefault(group.replace(" - ", " – "), []).append(row)  # " - " is ours, between two methods
    if len(members) >= MIN_GROUPS:
        among |= {group: np.array(of) for group, of in sorted(members.items())}
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
    for (other, method), (group, some) in itertools.product(itertools.combinations(results, 2), among.items()):
        name = f"{main}/{group}" if group else main
        if name in results[method] and name in results[other]:
            entry = measured.difference(method, other, metric, some)
            if group:
                entry.pop("p")
            results[method][f"{name} - {other}"] = entry
    correct_for_many([entry for of in results.values() for entry in of.values() if "p" in entry])
    for method in results.keys() & paper.values.keys():
        results[method][main]["paper"] = paper.values[method]
    return results


def correct_for_many(entries: Sequence[Entry]) -> None:
    """Give differences `p_holm`, their p-values corrected for their number."""
    for entry, corrected in zip(entries, holm([entry["p"] for entry in entries]), strict=True):
        entry["p_holm"] = corrected


class Measurements:
    """The outcomes' numbers by method, and what a metric makes of them over some examples, by their rows.

    Examples of one `source` are a cluster. `strata` [N] are what examples were chosen from, so many of each.
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
        """Whether a method's outcomes have the metric's number, which only some metrics may lack, and what it is of.

        No word begins in a piece of a long one, so a perplexity by word may be of nothing.
        """
        if metric.may_be_unknown and metric.numerator not in self.numbers[method]:
            return False
        return metric.denominator is None or bool(self.numbers[method][metric.denominator][among].any())

    def value(self, method: str, metric: Metric, among: np.ndarray) -> float:
        """Without its interval."""
        return value_of(self._ratio(method, metric, among))

    def metric(self, method: str, metric: Metric, among: np.ndarray) -> Entry:
        """With its interval."""
        ratio, clusters = self._ratio(method, metric, among), self.clusters.among(among)
        return _entry(interval_of_shares(ratio, self._num_resamples, self._seed, clusters), clusters)

    def difference(self, method: str, other: str, metric: Metric, among: np.ndarray) -> Entry:
        """Of a method from another, with its interval, and the p-value of no difference."""
        a, b = (self._ratio(name, metric, among) for name in (method, other))
        clusters = self.clusters.among(among)
        interval, p = difference_and_p(a, b, self._num_resamples, self._seed, clusters)
        return {**_entry(interval, clusters), "p": p}

    def _ratio(self, method: str, metric: Metric, among: np.ndarray) -> Ratio:
        of = self.numbers[method]
        denominators = np.ones(len(self.all)) if metric.denominator is None else of[metric.denominator]
        return Ratio(of[metric.numerator][among], denominators[among], metric.transform)


def clusters_of(rows: Sequence[Mapping[str, Any]], strata: Sequence[str] | None = None) -> Clusters:
    """By the source of each example; one that names none stands alone."""
    names: list[str | int] = [row.get("source") or number for number, row in enumerate(rows)]
    return Clusters.by_name(names, strata)


def _entry(interval: Interval, clusters: Clusters) -> Entry:
    """`clusters` where they are fewer than examples."""
    n = len(clusters.of_example)
    entry = {"value": interval.value, "n": n, "interval": [interval.low, interval.high]}
    return entry if len(clusters) == n else {**entry, "clusters": len(clusters)}


def add_wilson(results: Results, shares: Collection[str]) -> None:
    """Give entries of these metrics `wilson`, Wilson's interval of a share."""
    for of in results.values():
        for name, entry in of.items():
            if name.partition("/")[0] in shares and " - " not in name:
                interval = wilson_interval(round(entry["value"] * entry["n"]), entry["n"])
                entry["wilson"] = [interval.low, interval.high]


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
    head = ["method", main, "95% interval", *metrics[1:], *([f"paper, {paper_table}"] if has_paper else [])]
    size = size_text(next(iter(results.values()))[main])
    lines = [f"{title}, {size}", "", markdown_line(head), markdown_line(["---"] * len(head))]
    for method, of in results.items():
        low, high = of[main]["interval"]
        paper = [f"{of[main]['paper']:g}" if "paper" in of[main] else ""] if has_paper else []
        others = [f"{of[name]['value']:.4g}" if name in of else "" for name in metrics[1:]]
        lines.append(markdown_line([method, f"{of[main]['value']:.4f}", f"{low:.4f} to {high:.4f}", *others, *paper]))
    num = sum("p_holm" in entry for of in results.values() for entry in of.values())
    foot = foot_lines(num, next(iter(results.values()))[main])
    return "\n".join([*lines, "", *_difference_lines(results), *_group_lines(results, main), "", *foot]) + "\n"


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table. A cell is text, whatever it holds: groups are called as the data has them."""
    return f"| {' | '.join(map(markdown_text, cells))} |"


def markdown_text(text: str) -> str:
    """On one line, shown as it is by what reads Markdown, and by a terminal."""
    return MARKUP.sub(r"\\\g<0>", plain_line(text))


def row_names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, or their whole paths where two folders have one name."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def size_text(entry: Entry) -> str:
    """Of how many examples a figure is, and of how many sources where several are of one."""
    return f"n = {entry['n']}" + (f" of {entry['clusters']} sources" if "clusters" in entry else "")


def difference_text(entry: Entry) -> str:
    """A difference with its interval, and what that allows one to say among all comparisons of the table."""
    low, high = entry["interval"]
    alone = verdict(low, high)
    is_shown = entry.get("p_holm", 0.0) < LEVEL
    says = alone if is_shown or alone == verdict(0, 0) else f"{alone} if it were the only comparison"
    return f"{entry['value']:+.4f} ({low:+.4f} to {high:+.4f}: {says})"


def foot_lines(num_comparisons: int, entry: Entry) -> list[str]:
    """How intervals and verdicts are to be read; `entry` is a metric over all examples."""
    num, what = (entry["clusters"], "sources") if "clusters" in entry else (entry["n"], "examples")
    lines = [f"Intervals: 95%, each by itself, over {num} {what}."]
    if num_comparisons > 1:
        lines.append(f"Verdicts: p < {LEVEL} after Holm's correction for {num_comparisons} comparisons.")
    if num < FEW_CLUSTERS:
        lines.append(f"Of fewer than {FEW_CLUSTERS} {what}, intervals are too narrow.")
    return [" ".join(lines)]


def _difference_lines(results: Results) -> list[str]:
    """All of them, or of many those that show something."""
    lines = {}
    for method, of in results.items():
        for name, entry in of.items():
            metric, separator, other = name.partition(" - ")
            if separator and "/" not in metric:
                text = difference_text(entry)
                lines[f"- {metric} of {method} − {other}: {text}"] = verdict(0, 0) not in text
    if len(lines) <= MOST_DIFFERENCES or all(lines.values()):
        return list(lines)
    hidden = len(lines) - sum(lines.values())
    return [line for line in lines if lines[line]] + [f"- {hidden} others show no difference; results.json has them."]


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


LOWER_IS_BETTER = ("bpb", "token_perplexity", "word_perplexity")


def add_paper_figures(results: Results, paper: PaperConfig) -> str:
    """Put the paper's figures by group among ours; returns lines for the table, none where the paper has no figures."""
    if not (paper.values or paper.groups):
        return ""
    main = main_metric(results)
    for group, values in paper.groups.items():
        for method in values.keys() & results.keys():
            if entry := results[method].get(f"{main}/{group}"):
                entry["paper"] = values[method]
    rows = []
    for group, values in {"": paper.values, **paper.groups}.items():
        name = f"{main}/{group}" if group else main
        ours = {method: of[name]["value"] for method, of in results.items() if name in of}
        for method in (method for method in ours if method in values):
            gains = _gain(ours, method, main), _gain(values, method, main)
            label = f"{method}, {group}" if group else method
            rows.append([label, f"{ours[method]:.4f}", f"{values[method]:g}", *gains])
    rows += [[name, "", f"{value:g}", "", ""] for name, value in paper.values.items() if name not in results]
    if not rows:
        return ""
    head = [f"{main}, {paper.table or 'the paper'}", "ours", "paper", "gain, ours", "gain, paper"]
    return "\n" + "".join(f"{markdown_line(cells)}\n" for cells in (head, ["---"] * len(head), *rows))


def _gain(values: dict[str, float], method: str, main: str) -> str:
    """Of a method over no retrieval in percent of that, as the paper's tables have it; above 0 is better."""
    if method == NONE or not values.get(NONE):
        return ""
    change = 100 * (values[method] / values[NONE] - 1)
    return f"{-change if main in LOWER_IS_BETTER else change:+.1f}%"
