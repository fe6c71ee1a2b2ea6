"""Adaptive retrieval (Mallen et al. 2023, section 5): retrieve for subjects that are less popular than a threshold.

`replug report DIR... --policies OUT` reads finished evaluations of PopQA, such as one for each LM, and asks no LM. For
every pair of methods, one without retrieval and one with it, each relation has a threshold of popularity.

A question retrieves below the threshold of its relation. Candidates are never, every popularity observed in fitting,
and always; the largest number of right answers wins, and ties go to the lowest. Thresholds fitted to few questions
generalise badly: a relation with fewer than MIN_QUESTIONS to fit to uses the threshold of all questions. The policy is
fitted to 75% of the questions and measured on the others, in 100 random splits.

Letters: N questions, S splits, B resamples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.config.methods import GENREAD, NONE
from replug.data.files import replace_file, write_json
from replug.evals.folder import EvaluationFolder
from replug.evals.intervals import percentile_interval, resample_counts
from replug.evals.loop import OutcomeFile, Row
from replug.evals.tables import Block, Blocks, Table, html_page, row_names

POPULARITY, OTHERS = "popularity", "others"
NEVER, ALWAYS = -math.inf, math.inf
NEVER_RETRIEVE, ALWAYS_RETRIEVE, ADAPTIVE, ORACLE = "never", "always", "adaptive", "oracle"
NUM_SPLITS, FITTED_SHARE, NUM_RESAMPLES = 100, 0.75, 1000
MIN_QUESTIONS = 50
Numbers = Mapping[str, np.ndarray]  # name -> a method's numbers [N], NaN for unknown ones
Measured = dict[str, Any]  # the content of report.json for a pair of methods
COSTS = {  # of a question: name in outcomes -> column head and digits
    "lm_calls": ("LM calls", 2),
    "retriever_calls": ("searches", 2),
    "prompt_tokens": ("prompt tokens", 0),
    "generated_tokens": ("new tokens", 1),
}
NOTE = (
    "The policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by a bootstrap over questions with the thresholds as fitted. Gains are over the better of never and always. "
    f"A relation with fewer than {MIN_QUESTIONS} questions to fit to uses the threshold of all questions."
)


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """The answers of an evaluation to N questions: their relations [N], and the numbers of each method."""

    relations: np.ndarray
    methods: Mapping[str, Numbers]

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Return closed book with each other method, and GenRead with each retrieval method, as the paper does."""
        others = [method for method in self.methods if method != NONE]
        pairs = {method: (NONE, method) for method in others}
        if GENREAD in others:
            pairs |= {f"{GENREAD} + {name}": (GENREAD, name) for name in others if name != GENREAD}
        return pairs


def read_answered(folders: Sequence[EvaluationFolder]) -> dict[str, AnsweredQuestions]:
    """Return the answers of finished evaluations of the same questions, by the name of the folder.

    Raises UserError for few questions, and for outcomes without closed-book answers or without another method.
    """
    answered = {}
    for name, folder in zip(row_names([folder.path for folder in folders]), folders, strict=True):
        rows = OutcomeFile(folder.outcomes).rows
        methods = rows[0]["methods"]
        if len(rows) < MIN_QUESTIONS:
            raise UserError(f"{folder.path} asked {len(rows)} questions; expected {MIN_QUESTIONS} or more for a policy")
        if NONE not in methods or len(methods) == 1:
            raise UserError(
                f"{folder.path} has answers by {', '.join(methods)}; expected {NONE}, and a method with documents"
            )
        relations = np.array([row["group"] for row in rows])
        answered[name] = AnsweredQuestions(relations, {method: _numbers(rows, method) for method in methods})
    return answered


def _numbers(rows: Sequence[Row], method: str) -> dict[str, np.ndarray]:
    outcomes = [row["methods"][method]["numbers"] for row in rows]
    names = ("accuracy", "answer_recall", POPULARITY, *COSTS)
    return {name: np.array([outcome.get(name, np.nan) for outcome in outcomes], np.float64) for name in names}


# Fitting and measuring ------------------------------------------------------------------------------------------------


def best_threshold(popularity: np.ndarray, gains: np.ndarray) -> float:
    """Return the threshold of popularity [N] below which the gains [N] of retrieving have the largest sum."""
    order = np.argsort(popularity, kind="stable")
    values, sums = popularity[order], np.concatenate([[0.0], np.cumsum(gains[order])])
    is_first = np.append(True, values[1:] != values[:-1])
    cuts = np.append(np.flatnonzero(is_first), len(values))  # possible numbers of questions that retrieve
    best = cuts[sums[cuts].argmax()]
    return NEVER if best == 0 else ALWAYS if best == len(values) else float(values[best])


def fit_thresholds(relations: np.ndarray, popularity: np.ndarray, gains: np.ndarray) -> dict[str, float]:
    """Return the threshold of each relation with enough questions, and of all questions for OTHERS."""
    thresholds = {}
    for relation, count in zip(*np.unique(relations, return_counts=True), strict=True):
        if count >= MIN_QUESTIONS:
            own = relations == relation
            thresholds[str(relation)] = best_threshold(popularity[own], gains[own])
    return {**thresholds, OTHERS: best_threshold(popularity, gains)}


def draw_splits(num_questions: int, num_splits: int = NUM_SPLITS, seed: int = 0) -> np.ndarray:
    """Return a mask of the questions to fit to, bool [S, N], 75% of them."""
    rng = np.random.default_rng([seed, 3])
    splits = np.zeros((num_splits, num_questions), dtype=bool)
    for split in splits:
        split[rng.permutation(num_questions)[: round(FITTED_SHARE * num_questions)]] = True
    return splits


def decisions(relations: np.ndarray, popularity: np.ndarray, gains: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Return a mask of the questions that retrieve by the thresholds of each split, bool [S, N]."""
    decided = []
    for split in splits:
        thresholds = fit_thresholds(relations[split], popularity[split], gains[split])
        own = [thresholds.get(relation, thresholds[OTHERS]) for relation in relations.tolist()]
        decided.append(popularity < own)
    return np.array(decided)


def means_left_out(values: np.ndarray, splits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the means over splits of the mean over held-out questions, [B].

    `values` are [N] or [S, N]; `counts` [B, N] are the counts of each question in resamples.
    """
    held_out = ~splits
    return (counts @ np.where(held_out, values, 0.0).T / (counts @ held_out.T)).mean(axis=1)


def measure_pair(relations: np.ndarray, without: Numbers, documents: Numbers) -> Measured:
    """Return the entry of report.json for the numbers of a method without retrieval and of a method with it."""
    closed, augmented, popularity = without["accuracy"], documents["accuracy"], without[POPULARITY]
    gains, splits = augmented - closed, draw_splits(len(relations))
    itself = np.ones((1, len(relations)))
    counts = np.concatenate([itself, *resample_counts(len(relations), NUM_RESAMPLES, seed=0)])
    policies = {  # the questions that retrieve
        NEVER_RETRIEVE: np.zeros(len(relations), bool),
        ALWAYS_RETRIEVE: np.ones(len(relations), bool),
        ADAPTIVE: decisions(relations, popularity, gains, splits),
        ORACLE: gains > 0,
    }
    right = {
        name: means_left_out(np.where(retrieves, augmented, closed), splits, counts)
        for name, retrieves in policies.items()
    }
    better = max((NEVER_RETRIEVE, ALWAYS_RETRIEVE), key=lambda name: right[name][0])
    known = [name for name in COSTS if np.isfinite([without[name], documents[name]]).all()]
    measured = {}
    for name, retrieves in policies.items():
        spent = {cost: np.where(retrieves, documents[cost], without[cost]) for cost in known if name != ORACLE}
        measured[name] = {
            "accuracy": _interval(right[name]),
            "gain": _interval(right[name] - right[better]),
            "share": _interval(means_left_out(retrieves, splits, counts)),
            "costs": {cost: float(means_left_out(of, splits, itself)[0]) for cost, of in spent.items()},
        }
    thresholds = fit_thresholds(relations, popularity, gains)
    names = {NEVER: NEVER_RETRIEVE, ALWAYS: ALWAYS_RETRIEVE}
    return {
        "help and harm": help_and_harm(closed, augmented, documents["answer_recall"]),
        "thresholds": {relation: names.get(threshold, threshold) for relation, threshold in thresholds.items()},
        "better": better,
        "policies": measured,
    }


def _interval(resampled: np.ndarray) -> dict[str, float]:
    """Return the first value with the interval of the others."""
    return asdict(percentile_interval(float(resampled[0]), resampled[1:]))


def help_and_harm(closed: np.ndarray, augmented: np.ndarray, holds: np.ndarray) -> list[Measured]:
    """Return the four cells of right and wrong (table 1): retrieval harms in the second, helps in the third.

    `recall` is the share of questions with an answer in their documents; None without questions.
    """
    cells = []
    for closed_right, augmented_right in ((True, True), (True, False), (False, True), (False, False)):
        own = (closed == closed_right) & (augmented == augmented_right)
        recall = float(holds[own].mean()) if own.any() else None
        cell = {"closed_right": closed_right, "augmented_right": augmented_right, "n": int(own.sum())}
        cells.append({**cell, "share": float(own.mean()), "recall": recall})
    return cells


# The report ---------------------------------------------------------------------------------------------------------


def write_report(answered: Mapping[str, AnsweredQuestions], out: Path) -> dict[str, Blocks]:
    """Write report.json and, last, report.html; return the sections of the page."""
    out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, dict[str, Measured]] = {}
    sections: dict[str, Blocks] = {}
    for name, of in answered.items():
        measured[name] = {}
        for pair, (closed, augmented) in of.pairs().items():
            entry = measure_pair(of.relations, of.methods[closed], of.methods[augmented])
            measured[name][pair] = entry
            sections[f"{name}: {closed} or {augmented}"] = list(_pair_blocks(closed, augmented, entry))
    num = len(next(iter(answered.values())).relations)
    sections = {"": [f"{num:,} questions, asked in {', '.join(answered)}.", accuracy_table(measured)], **sections}
    write_json(out / "report.json", measured)
    replace_file(out / "report.html", html_page("When to retrieve", sections).encode())
    return sections


def accuracy_table(measured: Mapping[str, Mapping[str, Measured]]) -> Table:
    """Show the accuracy of closed book, of every other method, and of the policies, by evaluation (figure 7)."""
    shown: dict[str, dict[str, str]] = {}
    for name, pairs in measured.items():
        policies = {pair: of["policies"] for pair, of in pairs.items()}
        own = {NONE: next(iter(policies.values()))[NEVER_RETRIEVE]}
        own |= {pair: of[ALWAYS_RETRIEVE] for pair, of in policies.items() if " + " not in pair}
        own |= {f"{ADAPTIVE} {pair}": of[ADAPTIVE] for pair, of in policies.items()}
        shown[name] = {column: _interval_text(of["accuracy"]) for column, of in own.items()}
    columns = list(dict.fromkeys(column for own in shown.values() for column in own))
    rows = [[name, *(own.get(column, "") for column in columns)] for name, own in shown.items()]
    return Table(["right answers", *columns], rows)


def _pair_blocks(closed: str, augmented: str, of: Measured) -> Iterator[Block]:
    rows = []
    for cell in of["help and harm"]:
        right = ("right" if cell[name] else "wrong" for name in ("closed_right", "augmented_right"))
        recall = "" if cell["recall"] is None else f"{cell['recall']:.2f}"
        rows.append([*right, str(cell["n"]), f"{cell['share']:.0%}", recall])
    yield Table([closed, augmented, "questions", "share", "documents hold an answer"], rows)
    yield f"{augmented} harms in the second row and helps in the third."
    yield comparison_table(of)
    if of["policies"][ADAPTIVE]["gain"]["low"] <= 0:
        yield "No gain of the policy is shown: its interval holds 0."
    rules = [
        f"{relation}: {rule if isinstance(rule, str) else f'below {rule:g}'}"
        for relation, rule in of["thresholds"].items()
    ]
    yield f"The policy retrieves by relation: {'; '.join(rules)}."
    yield NOTE


def comparison_table(of: Measured) -> Table:
    """Show one policy per row; costs without a value are left out."""
    costs = of["policies"][NEVER_RETRIEVE]["costs"]
    head = ["policy", "accuracy", f"gain over {of['better']}", "retrieves", *(COSTS[cost][0] for cost in costs)]
    rows = []
    for name, policy in of["policies"].items():
        gain = "" if name == of["better"] else _interval_text(policy["gain"], "+")
        own = [f"{policy['costs'][cost]:,.{COSTS[cost][1]}f}" if policy["costs"] else "" for cost in costs]
        rows.append([name, _interval_text(policy["accuracy"]), gain, f"{policy['share']['value']:.0%}", *own])
    return Table(head, rows)


def _interval_text(of: Mapping[str, float], sign: str = "") -> str:
    return f"{of['value']:{sign}.3f} ({of['low']:{sign}.3f} to {of['high']:{sign}.3f})"
