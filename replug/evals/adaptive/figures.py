"""The figures of adaptive retrieval (Mallen et al. 2023, figures 1 and 4 to 11), each on one set of axes.

Which figures a report has, and what is said under each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from replug.config.methods import NONE
from replug.evals.adaptive import paper
from replug.evals.adaptive.comparison import POOLED, Compared
from replug.evals.adaptive.measured import MeasuredLM, MeasuredWay, PopularityBin, RelationFigures, popularity_of
from replug.evals.adaptive.outcomes import ADAPTIVE
from replug.evals.adaptive.protocol import Costs, Prices
from replug.evals.charts import COLOURS, to_svg
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS, Threshold

OTHERS = ("#7a9e7e", "#5b8db8", "#c2572b", "#8d6cab", "#c9b458", "#4c9a94")
LEGEND_CHARACTERS = 108  # of a line, with the marks and the spaces between columns
MIN_QUESTIONS = 5  # of fewer an accuracy says nothing, and its interval hides the others
DOTS = "#2f3e46"
CLOSED, BEST = "closed book", "best without a policy"  # how bars and lines are named
SCALES = {"popularity": "popularity of the subject", "frequency": "documents that name the subject"}
Bars = Mapping[str, Mapping[str, Interval | float]]  # by group, then by bar


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The same for the same names in the same order; closed book is grey, an adaptive way has its way's colour."""
    fixed = {CLOSED: COLOURS["none"], BEST: DOTS}
    ways = list(dict.fromkeys(name.removeprefix(ADAPTIVE) for name in names if name not in fixed))
    colours = fixed | {way: OTHERS[place % len(OTHERS)] for place, way in enumerate(ways)}
    return {name: colours[name.removeprefix(ADAPTIVE)] for name in names}


def named(method: str) -> str:
    """A method in plain words."""
    return CLOSED if method == NONE else method


def draw_popularity(axes: Axes, bins: Sequence[PopularityBin], label: str) -> None:
    """Accuracy against popularity, a line for each way to answer, with Wilson's intervals; a policy's is dashed."""
    _draw_ways(axes, bins, lambda one, shift: np.sqrt(one.low * one.high) * 1.06**shift)
    # Said, since there may be no bin with questions enough to be drawn, and an empty scale has no logarithm.
    axes.set_xlim(min(one.low for one in bins), max(one.high for one in bins))
    _log_scale(axes)
    axes.set_xlabel(label)


def draw_relative_popularity(axes: Axes, bins: Sequence[PopularityBin]) -> None:
    """As `draw_popularity`, against popularity among the questions of the same relation."""
    _draw_ways(axes, bins, lambda one, shift: (one.low + one.high) / 2 + 0.025 * shift)
    axes.set_xlabel("log popularity above its relation's mean, in standard deviations")


def _draw_ways(axes: Axes, bins: Sequence[PopularityBin], place_of: Callable[[PopularityBin, float], float]) -> None:
    """A line for each way, at places that are moved a little, so that intervals do not hide each other."""
    ways = list(dict.fromkeys(way for one in bins for way in one.accuracy))
    colours = colours_of([named(way) for way in ways])
    for number, way in enumerate(ways):
        shown = [one for one in bins if one.n >= MIN_QUESTIONS and way in one.accuracy]
        of = [one.accuracy[way] for one in shown]
        look: Any = {"marker": "o", "ms": 4, "lw": 1.5, "elinewidth": 0.8, "color": colours[named(way)]}
        if way.startswith(ADAPTIVE):
            look |= {"ls": "--", "mfc": "white"}
        at = [place_of(one, number - (len(ways) - 1) / 2) for one in shown]
        axes.errorbar(at, [_value(one) for one in of], _errors(of), label=named(way), **look)
    axes.set_ylabel("right answers")
    _percent(axes)
    _legend(axes)


def draw_correlations(axes: Axes, by_lm: Mapping[str, Sequence[RelationFigures]], method: str) -> None:
    """The correlation of closed-book accuracy with log popularity, by relation, a mark for each LM."""
    _draw_relations(axes, by_lm, lambda one: one.correlation[method])
    axes.axvline(0, color="#888", lw=0.8)
    axes.set_xlabel("correlation of being right with log popularity")


def draw_relations(axes: Axes, by_lm: Mapping[str, Sequence[RelationFigures]], method: str) -> None:
    """Closed-book accuracy by relation, a mark for each LM, with Wilson's intervals."""
    _draw_relations(axes, by_lm, lambda one: one.accuracy[method])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("right answers")


def _draw_relations(
    axes: Axes,
    by_lm: Mapping[str, Sequence[RelationFigures]],
    value_of: Callable[[RelationFigures], Interval | float | None],
) -> None:
    """Relations down the page, LMs a little below each other; what is None has no mark."""
    relations = [one.relation for one in next(iter(by_lm.values()))]
    for place, (name, figures) in enumerate(by_lm.items()):
        shift = 0.16 * (place - (len(by_lm) - 1) / 2)
        found = [(value_of(one), relations.index(one.relation) + shift) for one in figures]
        known = [(value, row) for value, row in found if value is not None]
        values, rows = [value for value, _ in known], [row for _, row in known]
        look: Any = {"fmt": "o", "ms": 6, "elinewidth": 0.9, "color": OTHERS[place % len(OTHERS)]}
        axes.errorbar([_value(one) for one in values], rows, xerr=_errors(values), label=name, **look)
    axes.set_yticks(range(len(relations)), relations)
    axes.set_ylim(len(relations) - 0.5, -0.5)
    _legend(axes)


def draw_bars(axes: Axes, bars: Bars, label: str, is_share: bool = False) -> None:
    """A group of bars for each key, with intervals where there are any."""
    names = list(dict.fromkeys(name for of in bars.values() for name in of))
    width = 0.82 / len(names)
    for place, (name, colour) in enumerate(colours_of(names).items()):
        groups = [row for row, of in enumerate(bars.values()) if name in of]
        values = [of[name] for of in bars.values() if name in of]
        heights = [_value(one) for one in values]
        at = [row + (place - (len(names) - 1) / 2) * width for row in groups]
        look: Any = {"color": colour, "error_kw": {"lw": 0.9}}
        if name.startswith(ADAPTIVE):
            look |= {"hatch": "////", "edgecolor": "white", "lw": 0}
        axes.bar(at, heights, width * 0.92, yerr=_errors(values), label=name, **look)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel(label)
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    if is_share:
        _percent(axes)
    _legend(axes)


def draw_policies(axes: Axes, compared: Sequence[Compared]) -> None:
    """Accuracy of each policy, down the page: a dot for a threshold by relation, a ring for one threshold for all."""
    rows = list(dict.fromkeys(one.name for one in compared))
    labels = [SIGNALS[name].title if name in SIGNALS else name for name in rows]
    for one in compared:
        is_ring = one.thresholds == POOLED
        at = rows.index(one.name) + (0.18 if is_ring else -0.18 if one.thresholds else 0.0)
        colour = OTHERS[1] if one.signal else DOTS
        look: Any = {"marker": "o", "ms": 6, "color": colour, "mfc": "white" if is_ring else colour, "elinewidth": 1}
        axes.errorbar(one.worth.accuracy.value, at, xerr=_errors([one.worth.accuracy]), **look)
    better = next(one for one in compared if one.name == one.worth.better)
    axes.axvline(better.worth.accuracy.value, color=DOTS, lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("right answers; ● a threshold for each relation, ○ one for all")


def draw_thresholds(
    axes: Axes, thresholds: Mapping[str, Threshold], popularity: np.ndarray, relations: Sequence[str], label: str
) -> None:
    """Each relation's popularities as dots and its threshold as a bar: what lies to the left of it retrieves."""
    names = sorted(thresholds)
    lowest, highest = max(popularity.min(), 1) / 1.5, popularity.max() * 1.5
    jitter = np.random.default_rng(0)
    for row, relation in enumerate(names):
        own = np.maximum(popularity[np.array(relations) == relation], 1)
        rule = thresholds[relation]
        limit = {"never": lowest, "always": highest}[rule] if isinstance(rule, str) else max(rule, lowest)
        axes.barh(row, limit - lowest, 0.8, left=lowest, color=OTHERS[1], alpha=0.3, lw=0)
        axes.plot(own, row + jitter.uniform(-0.28, 0.28, len(own)), ".", ms=2.5, color=DOTS, alpha=0.55)
        said = rule if isinstance(rule, str) else f"below {rule:,.0f}"
        axes.text(highest * 1.08, row, said, va="center", fontsize=8.5)
    _log_scale(axes)
    axes.set_xlim(lowest, highest)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{label}; blue: retrieves")


def _value(one: Interval | float) -> float:
    return one.value if isinstance(one, Interval) else one


def _errors(values: Sequence[Interval | float]) -> list[list[float]] | None:
    if not any(isinstance(one, Interval) for one in values):
        return None
    spreads = [(one.value - one.low, one.high - one.value) if isinstance(one, Interval) else (0, 0) for one in values]
    return [[max(spread[side], 0.0) for spread in spreads] for side in (0, 1)]  # a percentile may miss the value


def _log_scale(axes: Axes) -> None:
    """With numbers that are written out: mathematics is not read in our figures."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)


def _legend(axes: Axes) -> None:
    """Above the axes, in as many columns as the longest name leaves room for."""
    longest = max((len(str(label)) for label in axes.get_legend_handles_labels()[1]), default=0)
    columns = min(4, max(1, LEGEND_CHARACTERS // (longest + 8)))
    axes.legend(frameon=False, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)


WIDTH = 7.0


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: the name of its file, an <svg> element, and what is said under it."""

    name: str
    svg: str
    caption: str


def drawings_of_all(measured: Sequence[MeasuredLM], prices: Prices | None) -> list[Drawing]:
    """LMs side by side."""
    accuracy: Bars = {lm.name: {named(method): one for method, one in lm.accuracy.items()} for lm in measured}
    rarest: Bars = {lm.name: {"the rarest 28%": lm.rarest[NONE], "the others": lm.others[NONE]} for lm in measured}
    adaptive: Bars = {lm.name: _adaptive_bars(lm) for lm in measured}
    retrieved: Bars = {lm.name: {way.pair.name: way.by_popularity().worth.share for way in lm.ways} for lm in measured}
    by_lm = {lm.name: lm.relations for lm in measured}
    height = 1.4 + 0.28 * len(measured[0].relations)
    return [
        Drawing("accuracy", _share_bars(accuracy, "right answers"), f"Every way to answer. {paper.ACCURACY}"),
        Drawing("adaptive", _share_bars(adaptive, "right answers"), f"Policies by popularity. {paper.ADAPTIVE}"),
        Drawing("rarest", _share_bars(rarest, "right answers, closed book"), f"What LMs know. {paper.RAREST}"),
        Drawing(
            "retrieved",
            _share_bars(retrieved, "questions that retrieve"),
            f"How many questions a policy by popularity retrieves for. {paper.SHARE}",
        ),
        Drawing(
            "relations",
            to_svg(partial(draw_relations, by_lm=by_lm, method=NONE), WIDTH, height),
            "Closed book, by relation, with Wilson's 95% intervals.",
        ),
        Drawing(
            "correlation",
            to_svg(partial(draw_correlations, by_lm=by_lm, method=NONE), WIDTH, height),
            "Closed book, by relation. Far to the right, answers are known of popular subjects alone.",
        ),
        *(
            Drawing(f"cost_{name}", to_svg(partial(draw_bars, bars=bars, label=label), WIDTH, 3.6), said)
            for name, label, said, bars in _costs(measured, prices)
        ),
    ]


def _adaptive_bars(lm: MeasuredLM) -> dict[str, Interval]:
    best = max(lm.accuracy.values(), key=lambda one: one.value)
    return {BEST: best, **{way.pair.policy_name: way.by_popularity().worth.accuracy for way in lm.ways}}


def drawings_of_lm(lm: MeasuredLM) -> list[Drawing]:
    """One LM's answers by popularity, among all questions and among those of the same relation."""
    of_all = partial(draw_popularity, bins=lm.bins, label=SCALES[lm.answered.popularity_signal])
    of_relation = partial(draw_relative_popularity, bins=lm.relative_bins)
    said = "with Wilson's 95% intervals."
    return [
        Drawing(
            f"popularity_{_slug(lm.name)}", to_svg(of_all, WIDTH, 3.8), f"Right answers against popularity, {said}"
        ),
        Drawing(
            f"relative_popularity_{_slug(lm.name)}",
            to_svg(of_relation, WIDTH, 3.8),
            f"Right answers against popularity among the questions of the same relation, {said}",
        ),
    ]


def drawings_of_way(lm: MeasuredLM, way: MeasuredWay) -> list[Drawing]:
    """Two ways to answer: the policy by popularity, what policies are worth, and where that one retrieves."""
    name, scale = f"{_slug(way.pair.name)}_{_slug(lm.name)}", SCALES[way.popularity_signal]
    policies = partial(draw_policies, compared=way.compared)
    rows = len({one.name for one in way.compared})
    thresholds = partial(
        draw_thresholds,
        thresholds=way.thresholds,
        popularity=popularity_of(lm.answered),
        relations=lm.answered.relations,
        label=scale,
    )
    return [
        Drawing(
            f"adaptive_{name}",
            to_svg(partial(draw_popularity, bins=way.bins, label=scale), WIDTH, 3.8),
            "Two ways to answer, and a policy by popularity on questions left out of fitting (dashed).",
        ),
        Drawing(
            f"policies_{name}",
            to_svg(policies, WIDTH, 0.9 + 0.36 * rows),
            "Policies on questions left out of fitting. The dotted line is the better of never and always; the oracle "
            "takes whichever answer is right.",
        ),
        Drawing(
            f"thresholds_{name}",
            to_svg(thresholds, WIDTH, 0.9 + 0.3 * len(way.thresholds)),
            "Thresholds of a policy by popularity, fitted to all questions. A dot is a question.",
        ),
    ]


def _share_bars(bars: Bars, label: str) -> str:
    return to_svg(partial(draw_bars, bars=bars, label=label, is_share=True), WIDTH, 3.6)


def _costs(measured: Sequence[MeasuredLM], prices: Prices | None) -> Iterator[tuple[str, str, str, Bars]]:
    """Name, label, caption and bars of each cost that was measured."""
    of_policy = "Each way for every question, and under a policy by popularity (adaptive)."
    kinds: list[tuple[str, str, str, Callable[[Costs], float]]] = [
        ("seconds", "seconds a question", of_policy, lambda costs: costs.seconds),
        ("prompt_tokens", "prompt tokens a question", of_policy, lambda costs: costs.prompt_tokens),
    ]
    if prices is not None:
        said = f"{of_policy} {paper.COST}"
        kinds.append(("dollars", "dollars for 1,000 questions", said, lambda costs: costs.dollars(prices)))
    for name, label, said, value in kinds:
        bars = {lm.name: _cost_bars(lm, value) for lm in measured}
        if any(bars.values()):
            yield name, label, said, {lm: of for lm, of in bars.items() if of}


def _cost_bars(lm: MeasuredLM, value: Callable[[Costs], float]) -> dict[str, float]:
    """By way to answer, and by policy; what was not measured is left out."""
    bars = {named(name): value(of.costs().mean()) for name, of in lm.answered.methods.items()}
    for way in lm.ways:
        costs = way.by_popularity().costs
        assert costs is not None, "a policy by a signal has costs"
        bars[way.pair.policy_name] = value(costs)
    return {name: one for name, one in bars.items() if not math.isnan(one)}


def _slug(name: str) -> str:
    """A part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
