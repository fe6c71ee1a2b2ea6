"""All that a report is made of, measured from outcomes on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replug.config.errors import UserError
from replug.config.methods import GENREAD, NONE
from replug.data.progress import Progress
from replug.evals.adaptive.analyses import (
    Cell,
    PopularityBin,
    RelationFigures,
    accuracy_by_popularity,
    accuracy_by_relative_popularity,
    by_relation,
    help_and_harm,
    policy_by_popularity,
    popularity_of,
    rarest_and_others,
)
from replug.evals.adaptive.comparison import BY_RELATION, Compared, accuracy_of_policy, compare_policies
from replug.evals.adaptive.fitting import thresholds_by
from replug.evals.adaptive.outcomes import AnsweredQuestions, TwoWays
from replug.evals.adaptive.protocol import NUM_RESAMPLES
from replug.evals.intervals import Interval, wilson_interval
from replug.models.policy import Threshold


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
    return [_measure_lm(one, num_resamples, progress) for one in _told_apart(answered)]


def _told_apart(answered: Sequence[AnsweredQuestions]) -> list[AnsweredQuestions]:
    """LMs of one name, such as one LM in two dtypes, are named with their identities."""
    names = [one.name for one in answered]
    return [replace(one, name=f"{one.name} {one.identity}") if names.count(one.name) > 1 else one for one in answered]


def _measure_lm(answered: AnsweredQuestions, num_resamples: int, progress: Progress) -> MeasuredLM:
    ways = []
    for pair in _pairs(answered):
        ways.append(_measure_way(answered, pair, num_resamples))
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


def _measure_way(answered: AnsweredQuestions, pair: TwoWays, num_resamples: int) -> MeasuredWay:
    signal = answered.popularity_signal
    thresholds, _ = thresholds_by(answered, pair, signal)
    compared = compare_policies(answered, pair, num_resamples)
    bins = policy_by_popularity(answered, pair, accuracy_of_policy(answered, pair, signal))
    return MeasuredWay(pair, signal, help_and_harm(answered, pair), compared, thresholds, bins)
