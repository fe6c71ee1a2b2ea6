"""The figures of all evaluations and of training, as SVG or PNG.

Figures are created without pyplot, to keep the caller's backend.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "none": "#9aa0a6",
    "gold": "#b8860b",
    "random": "#c9b458",
    "replug": "#5b8db8",
    "lsr": "#c2572b",
    "replug/posterior": "#1f4e79",
    "lsr/posterior": "#7a2c10",
}
OTHERS = ("#7a9e7e", "#8c4a9e", "#3d8f8f", "#b86b8b", "#6b6bb8", "#a0752f")  # for all other names
STYLE = Path(__file__).with_name("charts.mplstyle")
LEGEND_CHARACTERS = 80
BLANKS = str.maketrans({" ": "␣", "\n": "\\n", "\t": "\\t"})

Draw = Callable[[Axes], None]


@contextmanager
def _styled() -> Iterator[None]:
    """Use our style, and suppress warnings of missing glyphs: browsers have other fonts."""
    with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing", UserWarning)
        yield


def to_svg(draw: Draw, width: float = 6.4, height: float = 3.0) -> str:
    """Return one set of drawn axes as an <svg> element."""
    content = io.StringIO()
    with _styled():
        _drawn(draw, width, height).savefig(content, format="svg", metadata={"Date": None})
    svg = content.getvalue()
    return svg[svg.index("<svg") :]


def write_png(path: Path, draw: Draw, width: float, height: float) -> None:
    """Write one set of drawn axes as a PNG file."""
    with _styled():
        _drawn(draw, width, height).savefig(path, dpi=110)


def _drawn(draw: Draw, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots())
    return figure


def lines(
    axes: Axes,
    points: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    *,
    marks: Sequence[float] = (),
    marker: str | None = "o",
) -> None:
    """Draw a line of (x, value) for each key; `marks` are dotted vertical lines."""
    for name, colour in colours_of([*points]).items():
        xs, values = [x for x, _ in points[name]], [value for _, value in points[name]]
        axes.plot(xs, values, marker=marker, ms=4, lw=1.5, color=colour, label=name)
    for mark in marks:
        axes.axvline(mark, color="black", alpha=0.4, linewidth=0.8, linestyle=":")
    axes.set_xlabel(x_label)
    if len(points) > 1:
        legend(axes)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name: its fixed colour, or the next of OTHERS in the order of names."""
    unknown = [name for name in names if name not in COLOURS]
    return {name: COLOURS.get(name) or OTHERS[unknown.index(name) % len(OTHERS)] for name in names}


def legend(axes: Axes) -> None:
    """Write a legend above the axes, in columns that fit its longest name."""
    longest = max(len(str(label)) for label in axes.get_legend_handles_labels()[1])
    columns = min(6, max(1, LEGEND_CHARACTERS // (longest + 8)))
    axes.legend(frameon=False, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)


def draw_document_weights(axes: Axes, picture: Mapping[str, Any]) -> None:
    """Draw the weight of each document at each token of a text as shades, and the gain of the weights below.

    `picture` has the texts of `tokens` [T], `documents`, their ids [K], `weights` [K][T] and `gain_bits` [T].
    """
    documents = [name if len(name) <= 30 else f"…{name[-29:]}" for name in picture["documents"]]
    tokens = [(token.strip(" ") or token).translate(BLANKS)[:14] for token in picture["tokens"]]
    places, place = range(len(tokens)), axes.get_subplotspec()
    assert place is not None, "the axes lie in a grid"
    rows = place.subgridspec(2, 1, height_ratios=(5, 2))
    axes.set_subplotspec(rows[0])
    shades = axes.imshow(picture["weights"], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(shades, ax=axes, label="weight", pad=0.01, aspect=30)
    axes.set_yticks(range(len(documents)), documents, fontsize=8)
    axes.set_xticks(places, tokens, fontsize=8, family="monospace")
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    for label, token in zip(axes.get_xticklabels(), tokens, strict=True):
        label.set_rotation(90 if len(token) > 2 else 0)
    axes.grid(visible=False)
    gains = axes.figure.add_subplot(rows[1], sharex=axes)
    colours = [COLOURS["replug/posterior" if gain > 0 else "lsr"] for gain in picture["gain_bits"]]
    gains.bar(places, picture["gain_bits"], 0.8, color=colours)
    gains.axhline(0, color="black", linewidth=0.6)
    gains.set_ylabel("gain, bits")
    gains.tick_params(axis="x", labelbottom=False, length=0)
    gains.grid(axis="x", visible=False)
