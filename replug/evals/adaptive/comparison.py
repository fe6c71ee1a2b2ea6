"""Policies by every signal that outcomes hold, compared on the same splits."""

from dataclasses import dataclass

import numpy as np

from replug.config.errors import UserError
from replug.evals.adaptive.costs import Costs, policy_costs
from replug.evals.adaptive.outcomes import AnsweredQuestions, TwoWays
from replug.evals.adaptive.protocol import (
    ALWAYS_RETRIEVE,
    NEVER_RETRIEVE,
    NUM_RESAMPLES,
    ORACLE,
    Questions,
    Rule,
    Worth,
    accuracy_left_out,
    decisions,
    draw_splits,
    measure,
    signal_auroc,
)
from replug.evals.adaptive.thresholds import NEVER
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS, KnownFrom, Signal

BY_RELATION, POOLED = "by relation", "one for all"


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy on the same splits as all others. `signal` is None of those that need none: never, always, oracle.

    `costs` are None of the oracle, which nobody can follow. `auroc` says how well the signal tells right closed-book
    answers from wrong ones; None where there is no signal, or nothing to tell.
    """

    name: str
    thresholds: str | None
    signal: str | None
    worth: Worth
    costs: Costs | None
    auroc: Interval | None


def choose_pair(answered: AnsweredQuestions, closed: str | None = None, augmented: str | None = None) -> TwoWays:
    """The two methods that are named; by default `none`, and the only other one there is.

    Raises UserError for a method that is not there, and where there are several to choose from.
    """
    methods = list(answered.methods)
    closed = closed or "none"
    others = [name for name in methods if name != closed]
    if augmented is None and len(others) != 1:
        raise UserError(f"--augmented is missing; expected one of {', '.join(others) or 'the methods'}")
    pair = TwoWays(closed, augmented or others[0])
    for option, name in (("--closed", pair.closed), ("--augmented", pair.augmented)):
        if name not in methods:
            raise UserError(f"{option}: no folder holds the method {name}; expected one of {', '.join(methods)}")
    if pair.closed == pair.augmented:
        raise UserError(f"--closed and --augmented are both {pair.closed}; expected two ways to answer")
    return pair


def compare_policies(answered: AnsweredQuestions, pair: TwoWays, num_resamples: int = NUM_RESAMPLES) -> list[Compared]:
    """Never, always, a policy by each signal with a threshold for each relation and with one for all, and the oracle.

    Raises UserError for fewer than two questions.
    """
    questions, splits = _questions(answered, pair), draw_splits(len(answered.ids))
    signals = {name: oriented(values, SIGNALS[name]) for name, values in answered.signals(pair).items()}
    kinds = [BY_RELATION, POOLED] if len(set(answered.relations)) > 1 else [POOLED]
    rules = {(name, kind): Rule(signals[name], kind == BY_RELATION) for name in signals for kind in kinds}
    keys = {f"{name}, {kind}": (name, kind) for name, kind in rules}
    worth = measure(questions, {label: rules[key] for label, key in keys.items()}, splits, num_resamples)
    aurocs = {name: signal_auroc(values, questions.closed, num_resamples) for name, values in signals.items()}
    by_signal = [
        Compared(name, kind, name, worth[label], _costs(answered, pair, rules[name, kind], splits, name), aurocs[name])
        for label, (name, kind) in keys.items()
    ]
    closed, augmented = (answered.methods[way].costs().mean() for way in (pair.closed, pair.augmented))
    return [
        Compared(NEVER_RETRIEVE, None, None, worth[NEVER_RETRIEVE], closed, None),
        Compared(ALWAYS_RETRIEVE, None, None, worth[ALWAYS_RETRIEVE], augmented, None),
        *by_signal,
        Compared(ORACLE, None, None, worth[ORACLE], None, None),
    ]


def accuracy_of_policy(answered: AnsweredQuestions, pair: TwoWays, signal: str) -> np.ndarray:
    """Of each question, [N], by thresholds for each relation that were fitted to others; NaN where none were."""
    rule = Rule(oriented(answered.signals(pair)[signal], SIGNALS[signal]))
    return accuracy_left_out(_questions(answered, pair), rule, draw_splits(len(answered.ids)))


def _questions(answered: AnsweredQuestions, pair: TwoWays) -> Questions:
    if len(answered.ids) < 2:
        raise UserError("the outcomes are of one question; expected two at least: one to fit to, one to measure")
    return answered.questions(pair)


def oriented(values: np.ndarray, signal: Signal) -> np.ndarray:
    """Values [N] turned so that retrieval is used below a threshold; -inf where a question has none."""
    return np.where(np.isnan(values), NEVER, signal.sign * values)


def _costs(answered: AnsweredQuestions, pair: TwoWays, rule: Rule, splits: np.ndarray, signal: str) -> Costs:
    known_from = SIGNALS[signal].known_from
    return policy_costs(
        answered.methods[pair.closed].costs(),
        answered.methods[pair.augmented].costs(),
        decisions(answered.questions(pair), rule, splits),
        splits,
        asks_first=known_from is KnownFrom.closed_answer,
        searches=known_from is KnownFrom.search,
    )
