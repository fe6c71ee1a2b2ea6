"""What the results say beyond metrics: fitted weights, Wilson's intervals, failures of the search, the FLOP figure.

An entry `validation` of each method that reranks says which weights were fitted, on how many questions, and what the
metric was there with them and with the default weights. Entries of shares get `wilson`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from replug.config.rules import evaluation_methods
from replug.data.files import replace_file
from replug.evals.comparison import main_metric, markdown_line
from replug.evals.figures import draw_costs, to_svg
from replug.evals.internet.measured import PASSAGES
from replug.evals.intervals import wilson_interval
from replug.evals.kinds import Finished
from replug.evals.outcomes import OutcomeFile
from replug.evals.results_files import sweeps_of

SHARES = ("exact_match", "accuracy", "answer_in_evidence", "copied", "best_candidate")


def add_internet_findings(finished: Finished) -> str:
    """Adds to the results, and returns tables of what was added."""
    results, folder = finished.results, finished.folder
    metric = main_metric(results)
    for of in results.values():
        _add_wilson(of)
    fitted: dict[str, dict[str, Any]] = json.loads(folder.weights.read_text())["methods"]
    for method, one in fitted.items():
        results[method]["validation"] = {
            "value": one["gain"],
            "n": one["num_questions"],
            "default": one["default_gain"],
            "weights": one["weights"],
        }
    if any("flop" in of for of in results.values()):
        sweeps = sweeps_of(evaluation_methods(finished.config), least=1)
        draw = partial(draw_costs, results=results, metric=metric, cost="flop", sweeps=sweeps)
        replace_file(folder.flop_figure, to_svg(draw, width=7, height=4).encode())
    return "\n".join([*_weight_lines(fitted, metric), *_failure_lines(OutcomeFile(folder.outcomes).rows), ""])


def _add_wilson(of: dict[str, Any]) -> None:
    for name, entry in of.items():
        if name.partition("/")[0] in SHARES and " - " not in name:
            interval = wilson_interval(round(entry["value"] * entry["n"]), entry["n"])
            entry["wilson"] = [interval.low, interval.high]


def _weight_lines(fitted: dict[str, dict[str, Any]], metric: str) -> list[str]:
    if not fitted:
        return []
    n = next(iter(fitted.values()))["num_questions"]
    if n == 0:
        return ["", "No question is of the validation part: every reranker has its default weights."]
    lines = ["", f"Weights are fitted on the validation part (n = {n}), and on none of the questions above.", ""]
    head = [f"method, its {metric} there", "default weights", "fitted weights", "weights"]
    lines += [markdown_line(head), markdown_line(["---"] * len(head))]
    for method, one in fitted.items():
        weights = ", ".join(f"{name} {value:g}" for name, value in one["weights"].items())
        lines.append(markdown_line([method, f"{one['default_gain']:.3f}", f"{one['gain']:.3f}", weights]))
    return lines


def _failure_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of all questions, those of the validation part too."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["methods"][PASSAGES]["detail"]["failures"] if PASSAGES in row["methods"] else {})
    if not counts:
        return []
    named = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return ["", f"Pages and searches that gave nothing, over {len(rows)} questions: {named}."]
