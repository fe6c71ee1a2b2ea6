"""Figures of a training run: the bars of its table, the curves of its metrics, and the overview of a README."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replug.cluster.device_use import ROLES
from replug.evals.figures import COLOURS, STYLE
from replug.train.results import DIFFERENCES, METHODS, headroom_of


def overview_png(path: Path, results: dict, metrics: Sequence[dict]) -> None:
    """Bits per byte, the intervals of the differences, and how the training went: the picture that a README shows."""
    with plt.rc_context(STYLE):
        figure: Figure
        figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained", width_ratios=(1.3, 1, 1))
        draw_bpb(axes[0], results)
        draw_intervals(axes[1], results)
        known = set().union(*metrics)
        draw_training = next((draw for key, draw in TRAININGS.items() if key in known), draw_loss)
        draw_training(axes[2], metrics)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def draw_bpb(axes: Axes, results: dict) -> None:
    """Grouped bars: one group for each domain, one bar for each method."""
    methods = [method for method in METHODS if method in results["bpb"]["all"]]
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        values = [row[method] for row in results["bpb"].values()]
        places = [group + (i - (len(methods) - 1) / 2) * width for group in range(len(values))]
        axes.bar(places, values, width * 0.92, color=COLOURS[method], label=METHODS[method])
    values = [value for row in results["bpb"].values() for value in row.values()]
    axes.set_ylim(0.85 * min(values), 1.2 * max(values))  # room above for the legend
    axes.set_xticks(range(len(results["bpb"])), [name.replace("_", "\n") for name in results["bpb"]])
    axes.set_ylabel("bits per byte")
    axes.set_title("held-out text (axis does not start at 0)", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center")


def draw_intervals(axes: Axes, results: dict) -> None:
    """Each difference in bits per byte with its 95% interval, beside the line of no difference."""
    for place, (name, (low, high)) in enumerate(results["intervals"].items()):
        first, second = DIFFERENCES[name]
        middle = results["bpb"]["all"][first] - results["bpb"]["all"][second]
        axes.plot([low, high], [place, place], color=COLOURS[first], linewidth=3, solid_capstyle="butt")
        axes.plot([middle], [place], "o", color=COLOURS[first])
        axes.annotate(f"{middle:+.3f}", (middle, place), xytext=(0, 8), textcoords="offset points", ha="center")
    labels = [" −\n".join(METHODS[method] for method in DIFFERENCES[name]) for name in results["intervals"]]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(labels) - 0.3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title("difference in bits per byte, 95% interval", fontsize=10)


def draw_headroom(axes: Axes, results: dict) -> None:
    """Of each retriever, a line from its ensemble to the better oracle on its documents, and both oracles on it."""
    rooms = headroom_of(results)
    for place, (method, room) in enumerate(rooms.items()):
        ends = [room.ensemble, min(room.q_weighted, room.best_document)]
        axes.plot(ends, [place, place], color=COLOURS[method], linewidth=3, alpha=0.35, solid_capstyle="butt")
        points = (
            ("o", room.ensemble, "ensemble"),
            ("s", room.q_weighted, "weighed by the LM's own scores"),
            ("^", room.best_document, "best document alone"),
        )
        for marker, value, label in points:
            axes.plot([value], [place], marker, color=COLOURS[method], label=label if not place else None)
    axes.axvline(results["bpb"]["all"]["none"], color=COLOURS["none"], linestyle="--", label=METHODS["none"])
    axes.set_yticks(range(len(rooms)), [METHODS[method] for method in rooms], fontsize=8)
    axes.set_ylim(len(rooms) - 0.5, -0.5)
    axes.set_xlabel("bits per byte with the same documents")
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_loss(axes: Axes, metrics: Sequence[dict]) -> None:
    """The KL loss at every step, and its running mean."""
    steps, losses = _series(metrics, "train/loss")
    axes.plot(steps, losses, color=COLOURS["replug"], alpha=0.4, linewidth=1)
    axes.plot(steps, _running_mean(losses, 8), color=COLOURS["replug"], label="mean of 8 steps")
    axes.set_title("KL loss (nats)", fontsize=10)
    _mark_swaps(axes, metrics)
    axes.legend(fontsize=8, frameon=False)


def draw_dev(axes: Axes, metrics: Sequence[dict]) -> None:
    """Bits per byte of labelled development texts, and the training loss's KL there."""
    axes.plot(*_changes(metrics, "dev/bpb"), "o-", color=COLOURS["lsr"], label="bits per byte")
    right = axes.twinx()
    right.plot(*_changes(metrics, "dev/kl"), "o-", color=COLOURS["none"], label="KL (right)")
    right.grid(False)
    axes.set_title("development texts, by labelled candidates", fontsize=10)
    axes.set_xlabel("step")
    axes.legend(handles=[*axes.lines, *right.lines], fontsize=8, frameon=False, loc="upper right")


def draw_entropies(axes: Axes, metrics: Sequence[dict]) -> None:
    """Entropy of the LM's and the retriever's distribution over the documents."""
    for key, name, colour in (("lm/entropy", "Q (LM)", "lsr"), ("retriever/entropy", "P_R (retriever)", "replug")):
        axes.plot(*_series(metrics, key), color=COLOURS[colour], label=name)
    axes.set_title("entropy over the retrieved documents (nats)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def draw_rank_correlation(axes: Axes, metrics: Sequence[dict]) -> None:
    """How far LM and retriever order the documents alike."""
    steps, values = _series(metrics, "retriever/rank_correlation")
    axes.plot(steps, values, color=COLOURS["lsr"], alpha=0.4, linewidth=1)
    axes.plot(steps, _running_mean(values, 8), color=COLOURS["lsr"])
    axes.set_title("rank correlation of LM and retriever (Kendall's tau)", fontsize=10)


def draw_index_age(axes: Axes, metrics: Sequence[dict]) -> None:
    """Steps since the weights that embedded the index; every fall is a hot swap."""
    axes.step(*_series(metrics, "index/age_steps"), where="post", color=COLOURS["none"])
    axes.set_title("age of the index (steps); dotted: hot swap", fontsize=10)
    axes.set_xlabel("step")
    _mark_swaps(axes, metrics)


def draw_heldout(axes: Axes, metrics: Sequence[dict]) -> None:
    """Bits per byte of held-out texts with the documents of the version that serves; a value for each refresh."""
    axes.step(*_series(metrics, "heldout/bpb"), where="post", color=COLOURS["lsr"])
    axes.set_title("bits per byte of held-out text, measured at each refresh", fontsize=10)
    axes.set_xlabel("step")


def draw_times(axes: Axes, metrics: Sequence[dict]) -> None:
    """Seconds of a step, by what they went into."""
    causes = {
        "training": ("time/train_seconds", "lsr"),
        "encoding queries": ("time/retrieve_seconds", "replug"),
        "waiting for the LM": ("time/wait_scores_seconds", "random"),
        "waiting for the index": ("time/wait_index_seconds", "none"),
    }
    seconds = [[row.get(key, 0.0) for row in metrics] for key, _ in causes.values()]
    colours = [COLOURS[name] for _, name in causes.values()]
    axes.stackplot([row["step"] for row in metrics], *seconds, labels=list(causes), colors=colours, alpha=0.8)
    axes.set_title("seconds of a step", fontsize=10)
    axes.set_xlabel("step")
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _series(metrics: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    rows = [(row["step"], row[key]) for row in metrics if key in row]
    return [step for step, _ in rows], [value for _, value in rows]


def _changes(metrics: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    """Of a value that every step repeats until there is a newer one."""
    steps, values = _series(metrics, key)
    new = [place for place, value in enumerate(values) if place == 0 or value != values[place - 1]]
    return [steps[place] for place in new], [values[place] for place in new]


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    examples = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(example) / len(example) for example in examples]


def _mark_swaps(axes: Axes, metrics: Sequence[dict]) -> None:
    for row in metrics:
        if row.get("index/swapped"):
            axes.axvline(row["step"], color="black", alpha=0.4, linewidth=0.8, linestyle=":")


TRAININGS = {"index/age_steps": draw_index_age, "dev/bpb": draw_dev}  # by a metric of it: what an overview shows


def devices_in(rows: Sequence[dict]) -> list[str]:
    """Return the names of the devices, by node and number."""
    names = {name for row in rows for name in row["busy"]}
    return sorted(names, key=lambda name: (name.rpartition(":")[0], name.rpartition(":")[2].zfill(9)))


def totals(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Shares of the time of all steps, by device and role; `idle` is what they leave of it, at least."""
    seconds = sum(row["seconds"] for row in rows)
    found: dict[str, dict[str, float]] = {}
    for device in devices_in(rows):
        busy = {role: sum(row["busy"].get(device, {}).get(role, 0.0) for row in rows) for role in ROLES}
        shares = {role: busy[role] / seconds for role in ROLES}
        found[device] = {**shares, "idle": max(0.0, 1.0 - sum(shares.values()))}
    return found
