"""What PopQA's results say beyond metrics: Wilson's intervals, the most frequent answer, correlation with popularity.

Entries of accuracies get `wilson`, and those of `accuracy` also `most_frequent_answer`: how often the answer that most
of a relation's questions have would be right, which needs no LM. `correlation`, also by relation, is Pearson's, of
accuracy with log10 of popularity (Mallen et al. 2023, figure 4).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from replug.evals.comparison import Entry, Results, markdown_line
from replug.evals.intervals import wilson_interval
from replug.evals.kinds import Finished
from replug.evals.outcomes import Row
from replug.evals.popqa.popularity import DOCUMENTS, PAGE_VIEWS, popularity_bin, popularity_correlation

SHARES = ("accuracy", "accuracy_dpr", "answer_recall")
SCALES = {
    PAGE_VIEWS: "Popularity is monthly page views of the subject (s_pop).",
    DOCUMENTS: "Popularity is the number of documents in the corpus that name the subject: the questions tell none.",
}


def add_popqa_findings(finished: Finished) -> str:
    """Adds to the results, and returns tables of what was added."""
    members = _members(finished.rows)
    for method, of in finished.results.items():
        for name, entry in of.items():
            _add_wilson(name, entry)
        for group, rows in members.items():
            if entry := of.get(_named("accuracy", group)):
                entry["most_frequent_answer"] = _mean(rows, method, "most_frequent_accuracy")
        of |= _correlations(members, method)
    return _lines(finished.rows, finished.results, members)


def _members(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """All rows under the empty name, those of each relation, and of each bin of popularity."""
    relations: dict[str, list[Row]] = {}
    bins: dict[str, list[Row]] = {}
    for row in rows:
        relations.setdefault(_any_outcome(row)["detail"]["relation"], []).append(row)
        bins.setdefault(popularity_bin(_any_outcome(row)["numbers"]["popularity"]), []).append(row)
    return {"": list(rows), **dict(sorted(relations.items())), **dict(sorted(bins.items()))}


def _any_outcome(row: Row) -> dict[str, Any]:
    """What is known of the question is the same in the outcome of every method."""
    outcome: dict[str, Any] = next(iter(row["methods"].values()))
    return outcome


def _add_wilson(name: str, entry: Entry) -> None:
    if name.partition("/")[0] in SHARES and " - " not in name:
        interval = wilson_interval(round(entry["value"] * entry["n"]), entry["n"])
        entry["wilson"] = [interval.low, interval.high]


def _correlations(members: dict[str, list[Row]], method: str) -> dict[str, Entry]:
    """Left out where all are right, none is, or all are equally popular."""
    found = {}
    for group, rows in members.items():
        if group.startswith("popularity "):
            continue
        numbers = [row["methods"][method]["numbers"] for row in rows]
        popularity, right = (np.array([of[name] for of in numbers]) for name in ("popularity", "accuracy"))
        value = popularity_correlation(popularity, right)
        if value is not None:
            found[_named("correlation", group)] = {"value": value, "n": len(rows)}
    return found


def _named(metric: str, group: str) -> str:
    return f"{metric}/{group}" if group else metric


def _mean(rows: Sequence[Row], method: str, name: str) -> float:
    return float(np.mean([row["methods"][method]["numbers"][name] for row in rows]))


def _lines(rows: Sequence[Row], results: Results, members: dict[str, list[Row]]) -> str:
    scale = SCALES[_any_outcome(rows[0])["detail"]["popularity_from"]]
    head = ["accuracy (Wilson's 95% interval)", "n", *results, "most frequent answer"]
    lines = ["", scale, "", markdown_line(head), markdown_line(["---"] * len(head))]
    lines += [markdown_line(_accuracies(group, some, results)) for group, some in members.items()]
    head = ["correlation of accuracy with log popularity", *results]
    lines += ["", markdown_line(head), markdown_line(["---"] * len(head))]
    for group in members:
        if any(_named("correlation", group) in of for of in results.values()):
            values = [of.get(_named("correlation", group)) for of in results.values()]
            lines.append(markdown_line([group or "all", *(f"{v['value']:+.2f}" if v else "" for v in values)]))
    return "\n".join(lines) + "\n"


def _accuracies(group: str, rows: Sequence[Row], results: Results) -> list[str]:
    answers = sorted({_any_outcome(row)["detail"]["most_frequent_answer"] for row in rows})
    frequent = _mean(rows, next(iter(results)), "most_frequent_accuracy")
    named = f" ({answers[0]})" if len(answers) == 1 else ""
    return [
        group or "all",
        str(len(rows)),
        *(_accuracy(rows, method) for method in results),
        f"{frequent:.3f}{named}",
    ]


def _accuracy(rows: Sequence[Row], method: str) -> str:
    interval = wilson_interval(sum(row["methods"][method]["numbers"]["accuracy"] for row in rows), len(rows))
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
