"""A plan as tables for a terminal (rich) or a document (Markdown)."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

ROLE_NAMES = {"score": "LM scoring", "embed": "embedding", "train": "training", "search": "search"}
COMPARED = (
    "run", "wall", "GPUs score/embed/train", "score h", "embed h", "train h", "dominates", "idle score/embed/train",
    "waits LM/index", "index lag",
)  # fmt: skip


def print_plan(title: str, plan: dict[str, Any], console: Console | None = None) -> None:
    """Everything that `plan_json` has, for people."""
    console = console or Console()
    console.print(_roles_table(title, plan))
    for line in plan_lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The sentences under the table."""
    wall, lag, waits = plan["wall"], plan["index_lag"], plan["waits"]
    stages = ", ".join(f"{name.replace('_', ' ')} {hours(value)}" for name, value in wall.items() if value > 0)
    lines = [
        f"ends after {hours(plan['wall_hours'])} ({stages}); {plan['steps_per_minute']:.3g} steps a minute",
        f"dominated by {ROLE_NAMES[plan['dominates']]}; the trainer waits {hours(waits['scores'])} for the LM and "
        f"{hours(waits['index'])} for the index",
        f"index at most {lag['max_steps']:,} steps ({hours(lag['max_hours'])}) old; {lag['refreshes']} refreshes of "
        f"{hours(lag['build_hours'])}, {lag['skipped']} skipped; searched on the {plan['search_on']}",
        f"disk {gigabytes(plan['disk_gb']['total'])}, of it index versions "
        f"{gigabytes(plan['disk_gb']['index_versions'])}; between roles {gigabytes(plan['network_gb']['total'])}",
    ]
    if (learning := plan["retriever"]["learning"]) != (parameters := plan["retriever"]["parameters"]):
        lines.append(
            f"{learning:,} weights of the retriever learn beside or among {parameters:,}: one rank takes "
            f"{gigabytes(plan['memory_gb']['train'])}, {gigabytes(plan['memory_gb']['train_checkpointed'])} with "
            "gradient checkpointing"
        )
    lines += [_gpu_line(kind) for kind in plan["gpus"]]
    if plan["dollars"] is not None:
        lines.append(f"{dollars(plan)} dollars, at {plan['price']:g} for an hour of one of {plan['devices']}")
    if plan["settings"]:
        lines.append(f"to run it so: {' '.join(plan['settings'])}")
    return lines + [f"note: {note}" for note in plan["notes"]]


def print_comparison(plans: Sequence[tuple[str, dict[str, Any]]], console: Console | None = None) -> None:
    table = Table(Column(COMPARED[0], overflow="fold"), *_compared(plans)[1:])
    for name, plan in plans:
        table.add_row(*comparison_row(name, plan))
    (console or Console()).print(table)


def markdown(plans: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The comparison as a Markdown table."""
    names = _compared(plans)
    rows = [names, tuple("---" for _ in names), *(comparison_row(name, plan) for name, plan in plans)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _compared(plans: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, ...]:
    """Dollars where a price was told, which is one of all plans."""
    return COMPARED if plans[0][1]["dollars"] is None else (*COMPARED, "dollars")


def comparison_row(name: str, plan: dict[str, Any]) -> tuple[str, ...]:
    roles, lag = ("score", "embed", "train"), plan["index_lag"]
    return (
        name,
        hours(plan["wall_hours"]),
        " / ".join(f"{plan['split'][role]:g}" for role in roles),
        *(f"{plan['hours'][role]:.3g}" for role in roles),
        plan["dominates"],
        " / ".join(f"{plan['idle'][role]:.0%}" for role in roles),
        " / ".join(hours(plan["waits"][cause]) for cause in ("scores", "index")),
        f"{lag['max_steps']:,} steps, {hours(lag['max_hours'])}",
        *(() if plan["dollars"] is None else (dollars(plan),)),
    )


def dollars(plan: dict[str, Any]) -> str:
    """In whole dollars from ten on; empty without a price."""
    value = plan["dollars"]
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def hours(value: float) -> str:
    """With the unit that reads best."""
    if value >= 1:
        return f"{value:.1f} h"
    return f"{60 * value:.1f} min" if value >= 1 / 60 else f"{3600 * value:.3g} s"


def gigabytes(value: float) -> str:
    """With the unit that reads best."""
    for unit, size in (("TB", 1000.0), ("GB", 1.0), ("MB", 0.001)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} kB"


def _roles_table(title: str, plan: dict[str, Any]) -> Table:
    unit = "machine" if plan["memory_limit_gb"] == 0 else "GPU"
    table = Table("role", f"{unit}s", "tokens", "FLOP", f"{unit} hours", "idle", f"memory of one {unit}", title=title)
    for role, name in ROLE_NAMES.items():
        table.add_row(
            name,
            f"{plan['split'][role]:g}" if role in plan["split"] else f"({plan['search_on']})",
            f"{plan['tokens'][role]:.3g}" if plan["tokens"][role] else "",
            f"{plan['flop'][role]:.2g}",
            f"{plan['hours'][role]:.3g}",
            f"{plan['idle'][role]:.0%}",
            _memory_cell(role, plan),
        )
    return table


def _memory_cell(role: str, plan: dict[str, Any]) -> str:
    needed = gigabytes(plan["memory_gb"][role])
    if role == "train":
        return f"{needed} ({gigabytes(plan['memory_gb']['train_checkpointed'])} with gradient checkpointing)"
    return f"{needed} in all" if role == "search" else needed


def _gpu_line(kind: dict[str, Any]) -> str:
    roles = " + ".join(kind["roles"]) or "idle"
    where = f"{kind['nodes'][0]}" if len(kind["nodes"]) == 1 else f"{len(kind['nodes'])} nodes"
    each = f"{kind['gb']:.1f} of {kind['limit_gb']:.1f} GB" + (" each" if kind["count"] > 1 else "")
    return f"{kind['count']} GPU{'s' if kind['count'] > 1 else ''} on {where}: {roles}, {each}"
