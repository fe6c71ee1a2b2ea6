"""Adaptive retrieval (Mallen et al. 2023, section 5): retrieve for subjects that are less popular than a threshold.

`replug report DIR... --policies OUT` reads finished evaluations of PopQA, one for each LM, and asks no LM. For every
pair of methods, one without retrieval and one with it, each relation has a threshold of popularity fitted to its
questions (`evals.thresholds`); the policy is measured on held-out questions.

The page has the paper's table 1 and figure 1, and compares the policy with never retrieving, always retrieving and an
oracle. `report.json` holds every number of the page by LM, and the thresholds, fitted to all questions.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from replug.config.errors import UserError
from replug.config.load import load_stored_evaluation_config
from replug.config.methods import GENREAD, NONE
from replug.data.files import replace_file, write_json
from replug.data.progress import Progress
from replug.evals import thresholds as fit
from replug.evals.charts import Value, lines, to_svg
from replug.evals.folder import LM, EvaluationFolder
from replug.evals.intervals import Interval, wilson_interval
from replug.evals.loop import OutcomeFile, Row
from replug.evals.tables import Block, Blocks, Table, figure, html_page, row_names

log = logging.getLogger(__name__)

POPULARITY = "popularity"
Pair = tuple[str, str]  # the names of a method without retrieval and a method with it
Numbers = Mapping[str, np.ndarray]  # name -> a method's numbers [N], NaN for unknown ones
Measured = dict[str, Any]  # the content of report.json for an LM, or for a pair of its methods
MIN_DRAWN = 5  # questions: with fewer, the interval is too wide to draw
COSTS = {  # of a question: name in outcomes -> column head and digits
    "lm_calls": ("LM calls", 2),
    "retriever_calls": ("searches", 2),
    "prompt_tokens": ("prompt tokens", 0),
    "generated_tokens": ("new tokens", 1),
}
CAPTION = "Two methods, and a policy by popularity on questions left out of fitting (dashed); Wilson's intervals."
NOTE = (
    "The policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by a bootstrap over questions that refits the policy. Gains are over the better of never and always. A "
    f"relation with fewer than {fit.MIN_QUESTIONS} questions to fit to uses the threshold of all questions."
)


def pair_name(pair: Pair) -> str:
    """Return the name of the second method, after the first one's unless that is closed book."""
    closed, augmented = pair
    return augmented if closed == NONE else f"{closed} + {augmented}"


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """One LM's answers to N questions: their relations, and the numbers of each method."""

    name: str
    identity: str
    relations: Sequence[str]
    methods: Mapping[str, Numbers]

    @property
    def popularity(self) -> np.ndarray:
        """Return the popularity of each subject, [N], the same under every method."""
        return self.methods[NONE][POPULARITY]

    def right(self, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each of the two methods is right, 0 or 1, int64 [N] each."""
        closed, augmented = (self.methods[name]["accuracy"].astype(np.int64) for name in pair)
        return closed, augmented

    def pairs(self) -> list[Pair]:
        """Return closed book with each other method, and GenRead with each retrieval method, as the paper does."""
        others = [method for method in self.methods if method != NONE]
        retrieving = [method for method in others if method != GENREAD]
        return [*((NONE, name) for name in others), *((GENREAD, name) for name in retrieving if GENREAD in others)]


def read_answered(folders: Sequence[EvaluationFolder]) -> list[AnsweredQuestions]:
    """Return the answers of finished evaluations of the same questions, named by LM, or by folder if LMs repeat.

    Raises UserError for outcomes without closed-book answers or without another method.
    """
    configs = [load_stored_evaluation_config(folder.config) for folder in folders]
    names = [config.lm.model or Path(str(config.lm.path)).name.rpartition(":")[2] for config in configs]
    if len(set(names)) < len(names):
        names = row_names([folder.path for folder in folders])
    answered = []
    for folder, name in zip(folders, names, strict=True):
        rows = [*{row["id"]: row for row in reversed(OutcomeFile(folder.outcomes).rows)}.values()][::-1]
        methods = rows[0]["methods"]
        if len(rows) < 2:
            raise UserError(f"{folder.path} asked one question; expected two or more, to fit and to measure")
        if NONE not in methods or len(methods) == 1:
            raise UserError(
                f"{folder.path} has answers by {', '.join(methods)}; expected {NONE}, and a method with documents"
            )
        numbers = {method: _numbers(rows, method) for method in methods}
        identity = str((folder.folder.inputs or {})[LM])
        answered.append(AnsweredQuestions(name, identity, [row["group"] for row in rows], numbers))
    return answered


def _numbers(rows: Sequence[Row], method: str) -> dict[str, np.ndarray]:
    outcomes = [row["methods"][method]["numbers"] for row in rows]
    names = dict.fromkeys([*COSTS, *(name for outcome in outcomes for name in outcome)])
    return {name: np.array([outcome.get(name, np.nan) for outcome in outcomes], np.float64) for name in names}


# Measuring --------------------------------------------------------------------------------------------------------


def measure_pair(answered: AnsweredQuestions, pair: Pair, num_resamples: int = fit.NUM_RESAMPLES) -> Measured:
    """Return the entry of report.json for a method without retrieval and a method with it."""
    right, splits = answered.right(pair), fit.draw_splits(len(answered.relations))
    rule = fit.rule_by(answered.popularity, answered.relations)
    retrieved = fit.decisions(rule, *right, splits)
    worth, better = fit.measure(rule, *right, splits, num_resamples)
    without, with_documents = (answered.methods[name] for name in pair)
    counted = [name for name in COSTS if np.isfinite([without[name], with_documents[name]]).all()]
    chosen = {name: np.where(retrieved, with_documents[name], without[name]) for name in counted}
    costs = {
        fit.NEVER_RETRIEVE: {name: float(without[name].mean()) for name in counted},
        fit.ALWAYS_RETRIEVE: {name: float(with_documents[name].mean()) for name in counted},
        fit.ADAPTIVE: {name: fit.mean_over_splits(own, splits) for name, own in chosen.items()},
        fit.ORACLE: {},  # no real policy
    }
    return {
        "closed": pair[0],
        "augmented": pair[1],
        "help and harm": help_and_harm(answered, pair),
        POPULARITY: accuracy_by_popularity(answered, pair, fit.accuracy_left_out(*right, retrieved, splits)),
        "thresholds": {POPULARITY: thresholds_of(answered, pair)},
        "better": better,
        "policies": {name: {**worth[name], "costs": of} for name, of in costs.items()},
    }


def thresholds_of(answered: AnsweredQuestions, pair: Pair) -> dict[str, float | Literal["never", "always"]]:
    """Return the thresholds, fitted to all questions, of relations with enough questions, and of `others`."""
    right, popularity = answered.right(pair), answered.popularity
    fitted = fit.fit_thresholds(fit.rule_by(popularity, answered.relations), *right)
    [fitted["others"]] = fit.fit_thresholds(fit.rule_by(popularity), *right).values()
    return {
        name: "never" if threshold == fit.NEVER else "always" if threshold == fit.ALWAYS else threshold
        for name, threshold in fitted.items()
    }


def accuracies(answered: AnsweredQuestions, among: np.ndarray) -> dict[str, Any]:
    """Return the accuracy by method among the questions bool [N], with Wilson's intervals."""
    right = {name: float(of["accuracy"][among].sum()) for name, of in answered.methods.items()}
    return {name: asdict(wilson_interval(num_right, int(among.sum()))) for name, num_right in right.items()}


def help_and_harm(answered: AnsweredQuestions, pair: Pair) -> list[Measured]:
    """Return the four cells of right and wrong (table 1): retrieval harms in the second, helps in the third.

    `recall` is the share of questions with an answer in their documents; None without questions or without the number
    `answer_recall`.
    """
    holds, right = answered.methods[pair[1]].get("answer_recall"), answered.right(pair)
    cells = []
    for closed, augmented in ((True, True), (True, False), (False, True), (False, False)):
        own = (right[0] == closed) & (right[1] == augmented)
        recall = float(holds[own].mean()) if holds is not None and own.any() else None
        cell = {"closed_right": closed, "augmented_right": augmented, "n": int(own.sum())}
        cells.append({**cell, "share": float(own.mean()), "recall": recall})
    return cells


def accuracy_by_popularity(answered: AnsweredQuestions, pair: Pair, adaptive: np.ndarray) -> list[Measured]:
    """Return the accuracy of a pair and its policy by bin of popularity, half powers of ten, without empty bins.

    `adaptive` [N] is the rate of right answers of the policy for each question. A popularity below 1 counts as 1.
    """
    popularity = np.maximum(answered.popularity, 1)
    edges = 10 ** (np.arange(0, 2 * np.ceil(np.log10(popularity.max() + 1)) + 1) / 2)
    places = np.searchsorted(edges, popularity, side="right") - 1
    bins = []
    for place in np.unique(places):
        own = places == place
        accuracy = {name: of for name, of in accuracies(answered, own).items() if name in pair}
        if not np.isnan(adaptive[own]).all():
            accuracy[f"{fit.ADAPTIVE} {pair_name(pair)}"] = float(np.nanmean(adaptive[own]))
        ends = {"low": float(edges[place]), "high": float(edges[place + 1])}
        bins.append({**ends, "n": int(own.sum()), "accuracy": accuracy})
    return bins


# The report ---------------------------------------------------------------------------------------------------------


def write_report(lms: Sequence[AnsweredQuestions], out: Path) -> dict[str, Blocks]:
    """Write figures, report.json and, last, report.html; return the sections of the page."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress("policies compared", sum(len(answered.pairs()) for answered in lms))
    measured: dict[str, Measured] = {}
    for answered in lms:
        num, pairs = len(answered.relations), {}
        for pair in answered.pairs():
            name = pair_name(pair)
            pairs[name] = of = measure_pair(answered, pair)
            if of["policies"][fit.ADAPTIVE]["gain"]["low"] <= 0:
                log.warning(f"{answered.name}, {name}: the policy may gain nothing over {of['better']}")
            progress.advance()
        accuracy = accuracies(answered, np.ones(num, dtype=bool))
        measured[answered.name] = {"identity": answered.identity, "n": num, "accuracy": accuracy, "pairs": pairs}

    about = f"{len(lms[0].relations):,} questions, asked of {', '.join(measured)}."
    sections: dict[str, Blocks] = {"": [about, accuracy_table(measured)]}
    for answered in lms:
        for name, of in measured[answered.name]["pairs"].items():
            svg = to_svg(partial(_draw_popularity, bins=of[POPULARITY]), 7.0, 3.8)
            slug = "".join(letter if letter.isalnum() else "_" for letter in f"{name} {answered.name}")
            replace_file(out / f"{fit.ADAPTIVE}_{slug}.svg", svg.encode())
            sections[f"{answered.name}: {of['closed']} or {of['augmented']}"] = [
                figure(svg, CAPTION),
                *_pair_blocks(of),
            ]
    write_json(out / "report.json", measured)
    replace_file(out / "report.html", html_page("When to retrieve", sections).encode())
    return sections


def accuracy_table(measured: Mapping[str, Measured]) -> Table:
    """Show the accuracy of every method by LM, and of the policies by popularity (figure 7)."""
    shown = {name: dict(lm["accuracy"]) for name, lm in measured.items()}
    for name, lm in measured.items():
        for pair, of in lm["pairs"].items():
            shown[name][f"{fit.ADAPTIVE} {pair}"] = of["policies"][fit.ADAPTIVE]["accuracy"]
    columns = list(dict.fromkeys(column for own in shown.values() for column in own))
    rows = [[n, *(_interval_text(own[of]) if of in own else "" for of in columns)] for n, own in shown.items()]
    return Table(["right answers", *columns], rows)


def _draw_popularity(axes: Axes, bins: Sequence[Measured]) -> None:
    """Draw figure 1: a line for each method, shifted slightly so that intervals do not overlap."""
    methods = list(dict.fromkeys(method for of in bins for method in of["accuracy"]))

    def drawn(accuracy: float | dict[str, float]) -> Value:
        return accuracy if isinstance(accuracy, float) else Interval(**accuracy)

    points = {
        method: [
            (
                math.sqrt(of["low"] * of["high"]) * 1.06 ** (number - (len(methods) - 1) / 2),
                drawn(of["accuracy"][method]),
            )
            for of in bins
            if of["n"] >= MIN_DRAWN and method in of["accuracy"]
        ]
        for number, method in enumerate(methods)
    }
    # A logarithmic scale needs limits even if no bin has enough questions to be drawn.
    axes.set_xlim(bins[0]["low"], bins[-1]["high"])
    dashed = [method for method in methods if method.startswith(fit.ADAPTIVE)]
    lines(axes, points, "popularity of the subject", "right answers", log_x=True, is_share=True, dashed=dashed)


def _pair_blocks(of: Measured) -> Iterator[Block]:
    rows = []
    for cell in of["help and harm"]:
        right = ("right" if cell[name] else "wrong" for name in ("closed_right", "augmented_right"))
        recall = "" if cell["recall"] is None else f"{cell['recall']:.2f}"
        rows.append([*right, str(cell["n"]), f"{cell['share']:.0%}", recall])
    yield Table([of["closed"], of["augmented"], "questions", "share", "documents hold an answer"], rows)
    yield f"{of['augmented']} harms in the second row and helps in the third."
    yield comparison_table(of)
    if of["policies"][fit.ADAPTIVE]["gain"]["low"] <= 0:
        yield "No gain of the policy is shown: its interval holds 0."
    rules = [
        f"{relation}: {rule if isinstance(rule, str) else f'below {rule:g}'}"
        for relation, rule in of["thresholds"][POPULARITY].items()
    ]
    yield f"The policy retrieves by relation: {'; '.join(rules)}."
    yield NOTE


def comparison_table(of: Measured) -> Table:
    """Show one policy per row; columns without a value are left out."""
    head = ["policy", "accuracy", f"gain over {of['better']}", "retrieves", *(name for name, _ in COSTS.values())]
    rows = []
    for name, policy in of["policies"].items():
        costs = policy["costs"]
        own = (f"{costs[cost]:,.{digits}f}" if cost in costs else "" for cost, (_, digits) in COSTS.items())
        gain = "" if name == of["better"] else _interval_text(policy["gain"], "+")
        rows.append([name, _interval_text(policy["accuracy"]), gain, f"{policy['share']['value']:.0%}", *own])
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return Table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])


def _interval_text(of: Mapping[str, float], sign: str = "") -> str:
    return f"{of['value']:{sign}.3f} ({of['low']:{sign}.3f} to {of['high']:{sign}.3f})"
