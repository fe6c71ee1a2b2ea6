"""All that a report is made of, measured from outcomes on disk.

Where retrieval helps and where it harms: outcomes by right and wrong, by popularity and by relation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replug.config.errors import UserError
from replug.config.methods import GENREAD, NONE
from replug.data.progress import Progress
from replug.evals.adaptive.comparison import BY_RELATION, Compared, accuracy_of_policy, compare_policies, thresholds_by
from replug.evals.adaptive.outcomes import POPULARITY, RECALL, AnsweredQuestions, TwoWays
from replug.evals.adaptive.paper import ALL_QUESTIONS, RAREST_QUESTIONS
from replug.evals.adaptive.protocol import NUM_RESAMPLES
from replug.evals.intervals import Interval, wilson_interval
from replug.evals.popqa import popularity_correlation, relative_popularity
from replug.models.policy import Threshold

RAREST_SHARE = RAREST_QUESTIONS / ALL_QUESTIONS


@dataclass(frozen=True, slots=True)
class Cell:
    """Questions by what is right: how many, their share, and the share whose documents hold an answer.

    `recall` is None where there are no questions, or nothing says what documents hold.
    """

    closed_right: bool
    augmented_right: bool
    n: int
    share: float
    recall: float | None


@dataclass(frozen=True, slots=True)
class PopularityBin:
    """Questions with a popularity from `low` on and below `high`: the accuracy of each method (Wilson's intervals).

    Relative popularity is in standard deviations. A policy's accuracy is a mean over splits and has no interval.
    """

    low: float
    high: float
    n: int
    accuracy: Mapping[str, Interval | float]


@dataclass(frozen=True, slots=True)
class RelationFigures:
    """One relation: accuracy by method, and its correlation with log popularity, None where nothing varies."""

    relation: str
    n: int
    accuracy: Mapping[str, Interval]
    correlation: Mapping[str, float | None]


def help_and_harm(answered: AnsweredQuestions, pair: TwoWays) -> list[Cell]:
    """The four cells of right and wrong (the paper's table 1): retrieval harms in the second, helps in the third."""
    questions = answered.questions(pair)
    held = answered.methods[pair.augmented].numbers.get(RECALL)
    cells = []
    for closed, augmented in ((True, True), (True, False), (False, True), (False, False)):
        there = (questions.closed == closed) & (questions.augmented == augmented)
        recall = float(held[there].mean()) if held is not None and there.any() else None
        cells.append(Cell(closed, augmented, int(there.sum()), float(there.mean()), recall))
    return cells


def popularity_of(answered: AnsweredQuestions) -> np.ndarray:
    """[N]; raises UserError where the outcomes do not hold it of every question."""
    popularity = answered.of_question(POPULARITY)
    if popularity is None or not np.isfinite(popularity).all():
        raise UserError(f"the outcomes of {answered.name} hold no popularity; expected those of evaluation=popqa")
    return popularity


def accuracy_by_popularity(answered: AnsweredQuestions) -> list[PopularityBin]:
    """In half powers of ten, those that hold questions; what is below 1 is with 1 (the paper's figures 1 and 5)."""
    return [_bin(answered, one, own) for one, own in _half_powers(answered)]


def accuracy_by_relative_popularity(answered: AnsweredQuestions) -> list[PopularityBin]:
    """Among the questions of their own relation, in half standard deviations (the paper's figure 7)."""
    relative = relative_popularity(popularity_of(answered), answered.relations)
    edges = np.arange(np.floor(2 * relative.min()), np.floor(2 * relative.max()) + 2) / 2
    return [_bin(answered, one, own) for one, own in _binned(relative, edges)]


def policy_by_popularity(answered: AnsweredQuestions, pair: TwoWays, right: np.ndarray) -> list[PopularityBin]:
    """Two ways and their policy, whose accuracy on each question is `right` [N], NaN where it was never measured."""
    bins = []
    for one, own in _half_powers(answered):
        measured = right[own & ~np.isnan(right)]
        found = _bin(answered, one, own, (pair.closed, pair.augmented))
        policy = {pair.policy_name: float(measured.mean())} if len(measured) else {}
        bins.append(replace(found, accuracy={**found.accuracy, **policy}))
    return bins


def _half_powers(answered: AnsweredQuestions) -> Iterator[tuple[tuple[float, float], np.ndarray]]:
    popularity = np.maximum(popularity_of(answered), 1)
    edges = 10 ** (np.arange(0, 2 * np.ceil(np.log10(popularity.max() + 1)) + 1) / 2)
    return _binned(popularity, edges)


def _binned(values: np.ndarray, edges: np.ndarray) -> Iterator[tuple[tuple[float, float], np.ndarray]]:
    """Both ends of each bin that holds values, and which it holds, bool [N]."""
    places = np.searchsorted(edges, values, side="right") - 1
    for place in np.unique(places):
        yield (float(edges[place]), float(edges[place + 1])), places == place


def _bin(
    answered: AnsweredQuestions, ends: tuple[float, float], own: np.ndarray, methods: Sequence[str] | None = None
) -> PopularityBin:
    accuracies = _accuracies(answered, own)
    return PopularityBin(*ends, int(own.sum()), {name: accuracies[name] for name in methods or accuracies})


def by_relation(answered: AnsweredQuestions) -> list[RelationFigures]:
    """In the order of their names."""
    popularity, relations = popularity_of(answered), np.array(answered.relations)
    figures = []
    for relation in sorted(set(answered.relations)):
        own = relations == relation
        correlation = {
            name: popularity_correlation(popularity[own], of.accuracy[own]) for name, of in answered.methods.items()
        }
        figures.append(RelationFigures(relation, int(own.sum()), _accuracies(answered, own), correlation))
    return figures


def rarest_and_others(answered: AnsweredQuestions) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Accuracy by method on the rarest 28%, as the paper's 4,000 of 14,267, and on the other questions."""
    order = np.argsort(popularity_of(answered), kind="stable")
    rarest = np.zeros(len(order), dtype=bool)
    rarest[order[: min(max(round(RAREST_SHARE * len(order)), 1), len(order) - 1)]] = True
    return _accuracies(answered, rarest), _accuracies(answered, ~rarest)


def _accuracies(answered: AnsweredQuestions, among: np.ndarray) -> dict[str, Interval]:
    return {
        name: wilson_interval(float(of.accuracy[among].sum()), int(among.sum()))
        for name, of in answered.methods.items()
    }


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """What is measured of two ways to answer; `thresholds` and `bins` are of a policy by popularity.

    `popularity_signal` is the name of its signal.
    """

    pair: TwoWays
    popularity_signal: str
    cells: list[Cell]
    compared: list[Compared]
    thresholds: dict[str, Threshold]
    bins: list[PopularityBin]

    def finest(self) -> list[Compared]:
        """With a threshold for each relation, where there are several; never, always and the oracle too."""
        has_relations = any(one.thresholds == BY_RELATION for one in self.compared)
        return [one for one in self.compared if one.signal is None or (one.thresholds == BY_RELATION) == has_relations]

    def by_popularity(self) -> Compared:
        """The paper's policy."""
        return next(one for one in self.finest() if one.signal == self.popularity_signal)


@dataclass(frozen=True, slots=True)
class MeasuredLM:
    """What is measured of one LM; `accuracy`, `rarest` and `others` by method, with Wilson's intervals."""

    answered: AnsweredQuestions
    accuracy: dict[str, Interval]
    bins: list[PopularityBin]
    relative_bins: list[PopularityBin]
    relations: list[RelationFigures]
    rarest: dict[str, Interval]
    others: dict[str, Interval]
    ways: list[MeasuredWay]

    @property
    def name(self) -> str:
        return self.answered.name


def measure_all(answered: Sequence[AnsweredQuestions], num_resamples: int = NUM_RESAMPLES) -> list[MeasuredLM]:
    """Every LM, and every way to answer against closed book; against GenRead too, as the paper's best policy is.

    Raises UserError where an LM has no closed-book answers, no others, or no popularity.
    """
    for one in answered:
        popularity_of(one)
        if NONE not in one.methods or len(one.methods) == 1:
            methods = ", ".join(one.methods)
            raise UserError(
                f"the outcomes of {one.name} are of {methods}; expected {NONE}, and a method with documents"
            )
    progress = Progress("policies compared", sum(len(_pairs(one)) for one in answered))
    names = [one.name for one in answered]
    measured = []
    for one in answered:
        if names.count(one.name) > 1:  # such as one LM in two dtypes
            one = replace(one, name=f"{one.name} {one.identity}")
        measured.append(_measure_lm(one, num_resamples, progress))
    return measured


def _measure_lm(answered: AnsweredQuestions, num_resamples: int, progress: Progress) -> MeasuredLM:
    ways, signal = [], answered.popularity_signal
    for pair in _pairs(answered):
        thresholds, _ = thresholds_by(answered, pair, signal)
        compared = compare_policies(answered, pair, num_resamples)
        right = policy_by_popularity(answered, pair, accuracy_of_policy(answered, pair, signal))
        ways.append(MeasuredWay(pair, signal, help_and_harm(answered, pair), compared, thresholds, right))
        progress.advance()
    accuracy = {
        name: wilson_interval(float(of.accuracy.sum()), len(of.accuracy)) for name, of in answered.methods.items()
    }
    bins = accuracy_by_popularity(answered), accuracy_by_relative_popularity(answered)
    return MeasuredLM(answered, accuracy, *bins, by_relation(answered), *rarest_and_others(answered), ways)


def _pairs(answered: AnsweredQuestions) -> list[TwoWays]:
    """What a policy chooses between: closed book and each other method, GenRead and each that reads documents."""
    others = [method for method in answered.methods if method != NONE]
    found = [method for method in others if method != GENREAD]
    of_written = [TwoWays(GENREAD, method) for method in found] if GENREAD in others else []
    return [*(TwoWays(NONE, method) for method in others), *of_written]
