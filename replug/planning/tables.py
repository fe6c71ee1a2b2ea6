"""Print plans as tables and sentences."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

Plan = dict[str, Any]
ROLE_NAMES = {"score": "LM scoring", "embed": "embedding", "train": "training", "search": "search"}


def print_plan(title: str, plan: Plan) -> None:
    """Print everything that the plan of a training or an evaluation has."""
    console = Console()
    if "stages" in plan:
        console.print(_stages_table(title, plan))
        lines = stage_lines(plan)
    elif "wall" in plan:
        console.print(_roles_table(title, plan))
        lines = plan_lines(plan)
    else:
        console.print(_models_table(title, plan))
        lines = evaluation_lines(plan)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def plan_lines(plan: Plan) -> list[str]:
    """Return the sentences under the table of a training."""
    refreshes, memory = plan["refreshes"], plan["memory_gb"]
    stages = ", ".join(f"{name.replace('_', ' ')} {hours(value)}" for name, value in plan["wall"].items())
    lines = [
        f"ends after {hours(plan['wall_hours'])} ({stages}); a step takes {plan['step_seconds']:.3g} s",
        f"dominated by {ROLE_NAMES.get(plan['dominates'], 'the interpreter of rank 0')}",
        f"{refreshes['count']} refreshes of {hours(refreshes['build_hours'])}, for which the trainer waits "
        f"{hours(refreshes['wait_hours'])}; the index is searched on the {plan['search_on']}",
        f"disk {gigabytes(plan['disk_gb']['total'])}, of it index versions "
        f"{gigabytes(plan['disk_gb']['index_versions'])}",
    ]
    if (learning := plan["retriever"]["learning"]) != (parameters := plan["retriever"]["parameters"]):
        lines.append(
            f"{learning:,} weights of the retriever learn beside or among {parameters:,}: one rank takes "
            f"{gigabytes(memory['train'])}, {gigabytes(memory['train_checkpointed'])} with gradient checkpointing"
        )
    for kind in plan["gpus"]:
        where = kind["nodes"][0] if len(kind["nodes"]) == 1 else f"{len(kind['nodes'])} nodes"
        gpus, each = ("GPUs", " each") if kind["count"] > 1 else ("GPU", "")
        roles = " + ".join(kind["roles"]) or "idle"
        lines.append(f"{kind['count']} {gpus} on {where}: {roles}, {kind['gb']:.1f} of {kind['limit_gb']:.1f} GB{each}")
    if plan["dollars"] is not None:
        lines.append(f"{_dollars(plan)} dollars, at {plan['price']:g} for an hour of one of {plan['devices']}")
    return [*lines, f"to run it so: {' '.join(plan['settings'])}", *(f"note: {note}" for note in plan["notes"])]


def stage_lines(plan: Plan) -> list[str]:
    """Return the sentences under the table of stages."""
    texts = plan["texts"]
    cost = "" if plan["dollars"] is None else f", {_dollars(plan)} dollars"
    return [
        f"texts: {texts['documents']:,} documents; {texts['queries']:,} training, {texts['dev']:,} development and "
        f"{texts['heldout']:,} held-out examples",
        f"about {hours(plan['wall_hours'])} on {plan['devices']}{cost}; the LM scores {plan['lm_calls']:,} pairs of "
        f"document and text, {plan['tokens']:.3g} tokens; disk {gigabytes(plan['disk_gb']['total'])}",
        *(f"note: {note}" for note in plan["notes"]),
    ]


def evaluation_lines(plan: Plan) -> list[str]:
    """Return the sentences under the table of an evaluation."""
    cost = "" if plan["dollars"] is None else f", {_dollars(plan)} dollars"
    return [
        f"{plan['examples']:,} examples, {plan['documents']:,} documents: {plan['gpu_hours']:.3g} GPU hours{cost}",
        f"on {plan['devices']} at least {hours(plan['wall_hours'])}: embedding, and the LMs one after the other",
        *(f"note: {note}" for note in plan["notes"]),
    ]


def print_comparison(plans: Sequence[tuple[str, Plan]]) -> None:
    """Print a row for each named plan: when it ends, the GPUs of each role, the GPU hours of each, dollars."""
    roles = [role for role in ROLE_NAMES if role in plans[0][1].get("hours", ()) and role != "search"]
    table = Table(Column("run", overflow="fold"), "wall", "GPUs", *(f"{role} h" for role in roles))
    if has_price := plans[0][1]["dollars"] is not None:
        table.add_column("dollars")
    for name, plan in plans:
        gpus = " / ".join(f"{plan['split'][role]:g}" for role in roles) if "split" in plan else plan["devices"]
        cells = [hours(plan["wall_hours"]), gpus, *(f"{plan['hours'][role]:.3g}" for role in roles)]
        table.add_row(name, *cells, *([_dollars(plan)] if has_price else []))
    Console().print(table)


def _dollars(plan: Plan) -> str:
    """Return whole dollars from ten on, cents below."""
    return f"{plan['dollars']:,.0f}" if plan["dollars"] >= 10 else f"{plan['dollars']:.2f}"


def hours(value: float) -> str:
    """Return hours in the unit that reads best."""
    if value >= 1:
        return f"{value:,.1f} h"
    return f"{60 * value:.1f} min" if value >= 1 / 60 else f"{3600 * value:.3g} s"


def gigabytes(value: float) -> str:
    """Return GB in the unit that reads best."""
    for unit, size in (("TB", 1000.0), ("GB", 1.0), ("MB", 0.001)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} kB"


def _roles_table(title: str, plan: Plan) -> Table:
    table = Table("role", "GPUs", "tokens", "FLOP", "GPU hours", "memory of one GPU", title=title)
    for role, name in ROLE_NAMES.items():
        memory = gigabytes(plan["memory_gb"][role])
        if role == "train":
            memory += f" ({gigabytes(plan['memory_gb']['train_checkpointed'])} with gradient checkpointing)"
        table.add_row(
            name,
            f"{plan['split'][role]:g}" if role in plan["split"] else f"({plan['search_on']})",
            f"{plan['tokens'][role]:.3g}" if plan["tokens"][role] else "",
            f"{plan['flop'][role]:.2g}",
            f"{plan['hours'][role]:.3g}",
            f"{memory} in all" if role == "search" else memory,
        )
    return table


def _stages_table(title: str, plan: Plan) -> Table:
    table = Table(
        "stage", "what is done", Column("pairs", justify="right"), Column("time", justify="right"), title=title
    )
    for stage in plan["stages"]:
        pairs = f"{stage['pairs']:,}" if stage["pairs"] else ""
        table.add_row(stage["name"], stage["work"], pairs, hours(stage["seconds"] / 3600))
    return table


def _models_table(title: str, plan: Plan) -> Table:
    table = Table("model", "GPUs", "tokens", "FLOP", "GPU hours", title=title)
    lms = ((lm["name"], lm["gpus"], lm["tokens_read"] + lm["tokens_generated"], lm) for lm in plan["lms"])
    encoders = ((f"{one['path']} ({one['name']})", 1, one["tokens"], one) for one in plan["retrievers"])
    for name, gpus, tokens, cost in (*lms, *encoders):
        table.add_row(name, str(gpus), f"{tokens:.3g}", f"{cost['flop']:.2g}", f"{cost['hours']:.3g}")
    return table
