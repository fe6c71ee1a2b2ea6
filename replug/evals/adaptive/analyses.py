"""Where retrieval helps and where it harms: outcomes by right and wrong, by popularity and by relation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replug.config.errors import UserError
from replug.evals.adaptive.outcomes import POPULARITY, RECALL, AnsweredQuestions, TwoWays
from replug.evals.adaptive.paper import ALL_QUESTIONS, RAREST_QUESTIONS
from replug.evals.intervals import Interval, wilson_interval
from replug.evals.popqa.popularity import popularity_correlation, relative_popularity

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
