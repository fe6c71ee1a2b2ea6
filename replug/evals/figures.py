"""Figures by matplotlib as SVG, and those of evaluations."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

COLOURS = {
    "none": "#9aa0a6",
    "gold": "#b8860b",
    "random": "#c9b458",
    "replug": "#5b8db8",
    "lsr": "#c2572b",
    "best": "#8c4a9e",
}
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a domain's name is a dollar sign
    "svg.hashsalt": "replug",  # the same figure gives the same bytes
}


def to_svg(draw: Callable[[Axes], None], width: float = 6.4, height: float = 3.0) -> str:
    """One set of axes, drawn and returned as an <svg> element."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        draw(axes)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        plt.close(figure)
    svg = content.getvalue()
    return svg[svg.index("<svg") :]


def _spread(results: dict, method: str, metric: str) -> tuple[float, float]:
    """Low and high of the paired difference from `none`, added to the value of `none`; without it the own interval.

    Texts differ far more than methods do on the same texts, so each method's own interval would hide what is certain.
    """
    if "none" not in results:
        low, high = results[method][metric]["interval"]
        return low, high
    base = results["none"][metric]["value"]
    if method == "none":
        return base, base
    if entry := results[method].get(f"{metric} - none"):
        low, high = entry["interval"]
        return base + low, base + high
    low, high = results["none"][f"{metric} - {method}"]["interval"]  # where `none` was named behind it
    return base - high, base - low


def _spread_name(results: dict) -> str:
    return "95% interval of the difference from none" if "none" in results else "95% interval"


def _legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_methods(axes: Axes, results: dict, metric: str) -> None:
    """One bar for each method with its interval; a metric by number of documents is `draw_sweep`'s."""
    methods = list(results)
    values = [results[method][metric]["value"] for method in methods]
    intervals = [_spread(results, method, metric) for method in methods]
    errors = [[v - low for v, (low, _) in zip(values, intervals, strict=True)]]
    errors.append([high - v for v, (_, high) in zip(values, intervals, strict=True)])
    axes.barh(methods, values, xerr=errors, color=[COLOURS.get(method, "#7a9e7e") for method in methods], height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric}; {_spread_name(results)}")
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    margin = 0.25 * (high - low) or 0.1
    axes.set_xlim(max(0.0, low - margin), high + margin)


def draw_sweep(axes: Axes, results: dict, metric: str, sweeps: dict[str, dict[int, str]]) -> None:
    """The metric over the number of documents, a line for each source; `sweeps` maps source -> number -> method."""
    for source, methods in sweeps.items():
        counts = sorted(methods)
        entries = [results[methods[count]][metric] for count in counts]
        colour = COLOURS.get(source)
        line = axes.plot(counts, [entry["value"] for entry in entries], marker="o", label=source, color=colour)
        low, high = zip(*(_spread(results, methods[count], metric) for count in counts), strict=True)
        axes.fill_between(counts, low, high, alpha=0.15, color=line[0].get_color())
    for name in ("none", "gold"):
        if name in results:
            axes.axhline(results[name][metric]["value"], color=COLOURS[name], linestyle="--", label=name)
    axes.set_xlabel(f"documents; {_spread_name(results)}")
    axes.set_ylabel(metric)
    _legend_above(axes)


def draw_costs(axes: Axes, results: dict, metric: str, cost: str, sweeps: dict[str, dict[int, str]]) -> None:
    """The metric over what an answer costs, on a logarithmic axis: a line for each source, a dot for other methods."""
    swept = {name for methods in sweeps.values() for name in methods.values()}
    lines = {source: [methods[count] for count in sorted(methods)] for source, methods in sweeps.items()}
    for label, names in {**lines, **{name: [name] for name in results if name not in swept}}.items():
        known = [name for name in names if cost in results[name]]
        costs, values = ([results[name][of]["value"] for name in known] for of in (cost, metric))
        axes.plot(costs, values, marker="o", label=label, color=COLOURS.get(label))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))  # not a formula
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{cost} of a question")
    axes.set_ylabel(metric)
    _legend_above(axes)
