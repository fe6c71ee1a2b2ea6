"""What several draws of demonstrations say of the same questions: over draws, and over questions.

Over draws: a metric's mean, standard deviation, least and greatest. Over questions: the comparison of methods as any
evaluation has it, of outcomes that are averaged over draws, question by question. `results.json` has both in one entry:
`draws` maps a draw to its value, beside `sd`, `least` and `greatest`. Pure.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.evals.comparison import Entry, Results, compare, main_metric, markdown_line, markdown_table, size_text
from replug.evals.examples import Example
from replug.evals.loop import Metric
from replug.evals.outcomes import Row
from replug.evals.paper_rows import add_paper_figures

ASKED = ("question", "references", "gold")  # columns of examples.parquet that no draw may change


@dataclass(frozen=True, slots=True)
class AveragedOutcomes:
    """A `Measured`: outcomes of which each is a mean over draws."""

    examples: Sequence[Example]
    metrics: Mapping[str, Metric]

    def groups(self, example: Example) -> tuple[str, ...]:
        return (example.group,)


def compare_draws(
    config: EvaluationConfig,
    results: Mapping[str, Results],
    examples: Mapping[str, Sequence[Row]],
    in_corpus: Collection[str] = (),
) -> Results:
    """Of the results and the rows of `examples.parquet` by draw, whose columns are at least `columns_of` the results.

    `in_corpus` are ids of questions in the corpus. Raises UserError where draws are of other questions.
    """
    of_draws = {name: _by_question(rows) for name, rows in examples.items()}
    _require_same_questions(of_draws)
    first = next(iter(of_draws.values()))
    known = next(iter(examples.values()))[0]  # seconds are of a few questions, and no number of an example
    metrics = {name: Metric(name, may_be_unknown=True) for name in _metrics(results) if name in known}
    rows = [_averaged(identifier, [of[identifier] for of in of_draws.values()], metrics) for identifier in first]
    task = AveragedOutcomes([Example(row["id"], "", row["group"]) for row in rows], metrics)
    overlapping = np.array([row["id"] in in_corpus for row in rows])
    compared = compare(task, rows, config.paper, config.num_resamples, config.seed, overlapping)
    for method, of in compared.items():
        for name, entry in of.items():
            entry |= _over_draws({draw: one[method][name]["value"] for draw, one in results.items()})
    return compared


def columns_of(results: Mapping[str, Results]) -> list[str]:
    """What is to be known of the examples: of the results by draw."""
    return ["id", "group", "method", "documents", *ASKED, *_metrics(results)]


def other_documents_line(examples: Mapping[str, Sequence[Row]]) -> str:
    """How often a draw has other documents: queries are embedded beside others in each, which moves last bits."""
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for rows in examples.values():
        for row in rows:
            found.setdefault((row["id"], row["method"]), set()).add(tuple(row["documents"]))
    num = sum(len(documents) > 1 for documents in found.values())
    return f"Draws differ in documents too for {num} of {len(found)} questions and methods.\n" if num else ""


def draw_table(compared: Results, config: EvaluationConfig, draws: Sequence[str]) -> str:
    """Over draws the methods and their differences from the first one, then what any evaluation's table has."""
    main, first = main_metric(compared), next(iter(compared))
    entries = {method: of[main] for method, of in compared.items()}
    entries |= {f"{method} − {first}": of[f"{main} - {first}"] for method, of in compared.items() if method != first}
    head = [f"{main} over draws", "mean", "standard deviation", "least", "greatest"]
    lines = [
        f"{config.evaluation}: {len(draws)} draws of demonstrations ({', '.join(draws)}), {size_text(entries[first])}",
        "",
        *map(markdown_line, (head, ["---"] * len(head), *(_cells(name, entry) for name, entry in entries.items()))),
        "",
        "The standard deviation is over draws. Intervals are over questions, of outcomes averaged over these draws.",
        "",
    ]
    table = markdown_table(compared, "Means over draws", config.paper.table)
    return "\n".join(lines) + "\n" + table + add_paper_figures(compared, config.paper) + "\n"


def _cells(name: str, entry: Entry) -> list[str]:
    return [name, *(f"{entry[of]:.4f}" for of in ("value", "sd", "least", "greatest"))]


def _over_draws(values: Mapping[str, float]) -> Entry:
    every = list(values.values())
    return {"draws": dict(values), "sd": statistics.stdev(every), "least": min(every), "greatest": max(every)}


def _by_question(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By id and method."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["id"], {})[row["method"]] = row
    return found


def _require_same_questions(of_draws: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> None:
    asked = {draw: {name: _asked(methods) for name, methods in of.items()} for draw, of in of_draws.items()}
    first = next(iter(asked))
    for draw, of in asked.items():
        for name in of.keys() | asked[first].keys():
            if of.get(name) != asked[first].get(name):
                raise UserError(
                    f"question {name!r} is not the same in the draws {first} and {draw}: questions.path was changed "
                    "between them; remove the folder of one of the two, bring its questions back, and run the same "
                    "command again"
                )


def _asked(methods: Mapping[str, Row]) -> list[Any]:
    row = next(iter(methods.values()))
    return [row.get(name) for name in ASKED]


def _metrics(results: Mapping[str, Results]) -> list[str]:
    """Those over all examples, in the order of the table."""
    named = dict.fromkeys(name for of in next(iter(results.values())).values() for name in of)
    return [name for name in named if "/" not in name and " - " not in name]


def _averaged(identifier: str, draws: Sequence[Mapping[str, Row]], metrics: Collection[str]) -> Row:
    """A question's outcomes by method; a number that some draw does not know is left out."""
    methods = {}
    for method in draws[0]:
        told: dict[str, list[Any]] = {name: [of[method].get(name) for of in draws] for name in metrics}
        numbers = {name: float(np.mean(every)) for name, every in told.items() if None not in every}
        methods[method] = {"numbers": numbers}
    group = next(iter(draws[0].values()))["group"]
    return {"id": identifier, "group": group, "methods": methods}
