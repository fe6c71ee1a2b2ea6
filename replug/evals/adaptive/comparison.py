"""Policies by every signal that outcomes hold, compared on the same splits.

The policy that is kept: thresholds fitted to all questions of one LM.

The comparison of policies as a table of text, for the console and for the report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replug.config.errors import UserError
from replug.evals.adaptive.outcomes import AnsweredQuestions, TwoWays, full_name, retriever_identity
from replug.evals.adaptive.protocol import (
    ALWAYS_RETRIEVE,
    NEVER_RETRIEVE,
    NUM_RESAMPLES,
    ORACLE,
    Costs,
    Prices,
    Questions,
    Rule,
    Worth,
    accuracy_left_out,
    decisions,
    draw_splits,
    measure,
    policy_costs,
    signal_auroc,
)
from replug.evals.adaptive.thresholds import ALWAYS, NEVER, fit_thresholds
from replug.evals.ensemble_temperatures import temperature_of
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS, KnownFrom, Policy, Signal, Threshold

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
    ways = answered.methods[pair.closed].costs(), answered.methods[pair.augmented].costs()
    by_signal = []
    for label, (name, kind) in keys.items():
        known_from, retrieved = SIGNALS[name].known_from, decisions(questions, rules[name, kind], splits)
        asks_first, searches = known_from is KnownFrom.closed_answer, known_from is KnownFrom.search
        costs = policy_costs(*ways, retrieved, splits, asks_first=asks_first, searches=searches)
        by_signal.append(Compared(name, kind, name, worth[label], costs, aurocs[name]))
    closed, augmented = (way.mean() for way in ways)
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


def fit_policy(answered: AnsweredQuestions, pair: TwoWays, signal: str) -> Policy:
    """By a signal, for two ways to answer.

    Raises UserError for a signal that the outcomes do not hold, and where the retriever is not known any more.
    """
    thresholds, pooled = thresholds_by(answered, pair, signal)
    of = answered.methods[pair.augmented]
    return Policy(
        lm=answered.identity,
        retriever=retriever_identity(pair.augmented, of.config, of.folder),
        closed=full_name(pair.closed, answered.methods[pair.closed].config.k),
        augmented=full_name(pair.augmented, of.config.k),
        signal=signal,
        thresholds=thresholds,
        pooled=pooled,
        fitted={
            "lm": answered.name,
            "folders": sorted({str(answered.methods[way].folder.path) for way in (pair.closed, pair.augmented)}),
            "questions": len(answered.ids),
            "query": of.config.questions.query,
            "max_new_tokens": of.config.questions.max_new_tokens,
        },
        temperature=temperature_of(pair.augmented, of.folder),
    )


def thresholds_by(answered: AnsweredQuestions, pair: TwoWays, signal: str) -> tuple[dict[str, Threshold], Threshold]:
    """By relation, and of all questions, in the signal's unit. Raises UserError for an unknown signal."""
    signals = answered.signals(pair)
    if signal not in signals:
        raise UserError(f"--signal: the outcomes hold no {signal}; expected one of {', '.join(signals) or 'no signal'}")
    questions, decides_by = answered.questions(pair), SIGNALS[signal]
    values = oriented(signals[signal], decides_by)
    fitted = fit_thresholds(values, answered.relations, questions.closed, questions.augmented)
    by_relation = {relation: _in_unit(value, decides_by) for relation, value in fitted.by_relation.items()}
    return by_relation, _in_unit(fitted.pooled, decides_by)


def with_accuracy(policy: Policy, compared: Sequence[Compared]) -> Policy:
    """The policy with how right such policies, and those without a signal, were on questions left out of fitting."""
    accuracy = {
        " ".join(filter(None, (one.name, one.thresholds))): one.worth.accuracy.value
        for one in compared
        if one.signal in (None, policy.signal)
    }
    return replace(policy, fitted={**policy.fitted, "accuracy on questions left out": accuracy})


def _in_unit(threshold: float, signal: Signal) -> Threshold:
    if threshold in (NEVER, ALWAYS):
        return "never" if threshold == NEVER else "always"
    return signal.sign * threshold


UNKNOWN = "–"
NOTE = (
    "Each policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by fitting anew in a bootstrap over questions. The gain is that over the better of never and always. AUROC: "
    "how well the signal tells right closed-book answers from wrong ones; 0.5 is chance."
)


def comparison_table(compared: Sequence[Compared], prices: Prices | None = None) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, a policy each; a column that nobody measured is left out."""
    better = compared[0].worth.better
    heads = ["policy", "accuracy", f"gain over {better}", "retrieves", "AUROC", *_cost_heads(prices)]
    rows = []
    for one in compared:
        name = f"{one.name}, {one.thresholds}" if one.thresholds else one.name
        gain = "" if one.name == better else with_interval(one.worth.gain, "+")
        share = f"{one.worth.share.value:.0%}"
        cells = [name, with_interval(one.worth.accuracy), gain, share, with_interval(one.auroc)]
        rows.append([*cells, *_cost_cells(one.costs, prices)])
    shown = [place for place in range(len(heads)) if any(row[place] not in ("", UNKNOWN) for row in rows)]
    return [heads[place] for place in shown], [[row[place] for place in shown] for row in rows]


def number(value: float, digits: int) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:,.{digits}f}"


def with_interval(interval: Interval | None, sign: str = "") -> str:
    """Such as 0.31 (0.27 to 0.35)."""
    if interval is None:
        return ""
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _cost_heads(prices: Prices | None) -> list[str]:
    heads = ["LM calls", "searches", "prompt tokens", "new tokens", "seconds"]
    return [*heads, "dollars per 1,000"] if prices else heads


def _cost_cells(costs: Costs | None, prices: Prices | None) -> list[str]:
    """Return the costs of a question; an oracle has none."""
    if costs is None:
        return [""] * len(_cost_heads(prices))
    cells = [
        number(costs.lm_calls, 2),
        number(costs.retriever_calls, 2),
        number(costs.prompt_tokens, 0),
        number(costs.generated_tokens, 1),
        number(costs.seconds, 2),
    ]
    return [*cells, number(costs.dollars(prices), 2)] if prices else cells
