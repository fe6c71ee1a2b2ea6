"""One chart of a plan: what each role does when, the refreshes and the waits."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from replug.planning.plans import Plan, idle_shares
from replug.planning.simulate import SimulatedRun, Span

BINS = 400
MOST_LABELLED = 12  # refreshes; more would overlap
COLOURS = {"score": "#c2572b", "embed": "#5b8db8", "train": "#5f9e6e", "wait": "#d9a5a0", "idle": "#eef0f2"}
ROWS = (("score", "LM scoring"), ("embed", "embedding"), ("train", "training"))
STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plan_png(path: Path, title: str, plan: Plan) -> None:
    """Write the chart. A bar is as high as the share of the role's devices at work, of shared ones at the role's."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 3.6), layout="constrained")
        draw_time_line(axes, plan)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def draw_time_line(axes: Axes, plan: Plan) -> None:
    simulated = plan.estimate.simulated
    scale, unit = next((s, name) for s, name in UNITS if simulated.times.wall >= 2 * s or s == 1.0)
    for row, (role, name) in enumerate(reversed(ROWS)):
        _draw_role(axes, plan, role, row, scale)
        _label_role(axes, plan, role, name, row)
    _draw_index_waits(axes, simulated, scale)
    _draw_refreshes(axes, simulated, scale)
    axes.set_xlim(0, simulated.times.wall / scale)
    axes.set_ylim(-0.1, 3.25)
    axes.set_yticks([])
    axes.set_xlabel(f"{unit} since the start")
    _legend(axes)


def busy_shares(spans: list[Span], devices: int, wall: float, bins: int = BINS) -> np.ndarray:
    """Share of the devices at work in each of so many equal parts of the run, [bins]."""
    edges = np.linspace(0.0, wall, bins + 1)
    if not spans:
        return np.zeros(bins)
    begin, end, number = (np.array(column, dtype=float) for column in zip(*spans, strict=True))
    # Work done until each edge: of what has begun by then, all but what was still to do.
    done = [_until(begin, end, number, edge) for edge in edges]
    return np.diff(done) / (devices * wall / bins)


def _until(begin: np.ndarray, end: np.ndarray, number: np.ndarray, time: float) -> float:
    return float(np.sum(number * (np.minimum(end, time) - np.minimum(begin, time))))


def _draw_role(axes: Axes, plan: Plan, role: str, row: int, scale: float) -> None:
    simulated = plan.estimate.simulated
    devices = plan.estimate.allocation.devices(role)
    shares = np.minimum(1.0, busy_shares(simulated.spans[role], devices, simulated.times.wall))
    edges = np.linspace(0.0, simulated.times.wall, BINS + 1) / scale
    axes.fill_between(edges[[0, -1]], row, row + 0.8, color=COLOURS["idle"], linewidth=0)
    axes.stairs(row + 0.8 * shares, edges, baseline=row, fill=True, color=COLOURS[role])


def _label_role(axes: Axes, plan: Plan, role: str, name: str, row: int) -> None:
    count = plan.estimate.split.by_role()[role]
    kind = plan.devices.accelerator.name
    what = f"{count:g} {kind}" if not plan.devices.accelerator.is_cpu else f"{count:g} actor{'s' * (count != 1)}"
    idle = idle_shares(plan.estimate)[role]
    text = f"{name}\n{what}\nidle {idle:.0%}"
    axes.text(-0.01, row + 0.4, text, transform=axes.get_yaxis_transform(), ha="right", va="center")


def _draw_index_waits(axes: Axes, simulated: SimulatedRun, scale: float) -> None:
    for span in simulated.index.waits:
        axes.fill_between([span.begin / scale, span.end / scale], 0, 0.8, color=COLOURS["wait"], linewidth=0)


def _draw_refreshes(axes: Axes, simulated: SimulatedRun, scale: float) -> None:
    """A line where an index is adopted; its step where there is room."""
    adopted = [r for r in simulated.index.refreshes if r.adopted is not None]
    for number, refresh in enumerate(adopted):
        x = (refresh.adopted or 0.0) / scale
        axes.plot([x, x], [0, 2.95], color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
        if number % -(-len(adopted) // MOST_LABELLED) == 0:
            axes.text(x, 3.0, f"{refresh.adopted_step:,}", ha="center", va="bottom", fontsize=8.5)
    if adopted:
        names = axes.get_yaxis_transform()
        axes.text(-0.01, 3.0, "new index at step", transform=names, ha="right", va="bottom", fontsize=8.5)


def _legend(axes: Axes) -> None:
    names = {"idle": "idle", "wait": "trainer waits for a refresh"}
    handles = [Patch(color=COLOURS[key], label=name) for key, name in names.items()]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, frameon=False, fontsize=9)
