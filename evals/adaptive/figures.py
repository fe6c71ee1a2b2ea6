"""The figures of adaptive retrieval (Mallen et al. 2023, figures 1, 4 and 7 to 11), each on one set of axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from replug.configs.methods import NONE
from replug.evals.adaptive.analyses import PopularityBin, RelationFigures
from replug.evals.adaptive.comparison import POOLED, Compared
from replug.evals.figures import COLOURS
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS, Threshold

OTHERS = ("#7a9e7e", "#5b8db8", "#c2572b", "#8d6cab", "#c9b458", "#4c9a94")
MIN_QUESTIONS = 5  # of fewer an accuracy says nothing, and its interval hides the others
DOTS = "#2f3e46"
CLOSED, ADAPTIVE = "closed book", "adaptive "  # how bars and lines are named
Bars = Mapping[str, Mapping[str, Interval | float]]  # by group, then by bar


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The same for the same names in the same order; closed book is grey, an adaptive way has its way's colour."""
    ways = [name for name in names if name != CLOSED and not name.startswith(ADAPTIVE)]
    colours = {CLOSED: COLOURS["none"], **{way: OTHERS[place % len(OTHERS)] for place, way in enumerate(ways)}}
    return {name: colours[name.removeprefix(ADAPTIVE)] for name in names}


def named(method: str) -> str:
    """A method in plain words."""
    return CLOSED if method == NONE else method


def draw_popularity(axes: Axes, bins: Sequence[PopularityBin], methods: Sequence[str]) -> None:
    """Accuracy against popularity, a line for each way to answer, with Wilson's intervals."""
    colours = colours_of([named(method) for method in methods])
    shown = [one for one in bins if one.n >= MIN_QUESTIONS]
    middles = np.array([np.sqrt(one.low * one.high) for one in shown])
    for place, method in enumerate(methods):
        of = [one.accuracy[method] for one in shown]
        moved = middles * 1.06 ** (place - (len(methods) - 1) / 2)  # so that intervals do not hide each other
        errors = _errors(of)
        look: Any = {"marker": "o", "ms": 4, "lw": 1.5, "elinewidth": 0.8, "color": colours[named(method)]}
        axes.errorbar(moved, [one.value for one in of], errors, label=named(method), **look)
    _log_scale(axes)
    axes.set_xlabel("popularity of the subject")
    axes.set_ylabel("right answers")
    _percent(axes)
    _legend(axes)


def draw_correlations(axes: Axes, by_lm: Mapping[str, Sequence[RelationFigures]], method: str) -> None:
    """The correlation of closed-book accuracy with log popularity, by relation, a mark for each LM."""
    relations = [one.relation for one in next(iter(by_lm.values()))]
    for place, (name, figures) in enumerate(by_lm.items()):
        found = [(one.correlation[method], relations.index(one.relation)) for one in figures]
        known = [(value, row) for value, row in found if value is not None]
        values, rows = zip(*known, strict=True) if known else ((), ())
        axes.plot(values, rows, "o", ms=6, color=OTHERS[place % len(OTHERS)], label=name)
    axes.axvline(0, color="#888", lw=0.8)
    axes.set_yticks(range(len(relations)), relations)
    axes.invert_yaxis()
    axes.set_xlabel("correlation of being right with log popularity")
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
    axes: Axes, thresholds: Mapping[str, Threshold], popularity: np.ndarray, relations: Sequence[str]
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
    axes.set_xlabel("popularity of the subject; blue: retrieves")


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
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
