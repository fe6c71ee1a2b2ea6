"""The plan of an evaluation as tables for a terminal (rich) or a document (Markdown)."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from replug.planning.tables import dollars, hours

COMPARED = ("run", "examples", "LM tokens", "LM h", "embedding tokens", "embedding h", "GPU h", "dollars")


def print_evaluation(title: str, plan: dict[str, Any], console: Console | None = None) -> None:
    """Everything that `evaluation_json` has, for people."""
    console = console or Console()
    console.print(_table(title, plan))
    for line in evaluation_lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def evaluation_lines(plan: dict[str, Any]) -> list[str]:
    """The sentences under the table."""
    put = sum(lm["tokens_put"] for lm in plan["lms"])
    first = f"{plan['examples']:,} examples, {plan['documents']:,} documents: {plan['gpu_hours']:.3g} GPU hours"
    lines = [
        f"{first}{'' if plan['dollars'] is None else f', {dollars(plan)} dollars'}",
        f"on {plan['devices']} at least {hours(plan['wall_hours'])}: embedding, and the LMs one after the other",
    ]
    if put:
        lines.append(f"prompts have {put:.3g} tokens; what they share is read once by local weights")
    return lines + [f"note: {note}" for note in plan["notes"]]


def print_evaluations(plans: Sequence[tuple[str, dict[str, Any]]], console: Console | None = None) -> None:
    table = Table(*COMPARED)
    for name, plan in plans:
        table.add_row(*evaluation_row(name, plan))
    (console or Console()).print(table)


def evaluation_markdown(plans: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The comparison as a Markdown table."""
    rows = [COMPARED, tuple("---" for _ in COMPARED), *(evaluation_row(name, plan) for name, plan in plans)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def evaluation_row(name: str, plan: dict[str, Any]) -> tuple[str, ...]:
    tokens, of = plan["tokens"], plan["hours"]
    return (
        name,
        f"{plan['examples']:,}",
        f"{tokens['score']:.3g}",
        f"{of['score']:.2g}",
        f"{tokens['embed']:.3g}",
        f"{of['embed']:.2g}",
        f"{plan['gpu_hours']:.2g}",
        dollars(plan),
    )


def _table(title: str, plan: dict[str, Any]) -> Table:
    table = Table("role", "model", "GPUs", "tokens", "FLOP", "GPU hours", title=title)
    for lm in plan["lms"]:
        tokens = lm["tokens_read"] + lm["tokens_generated"]
        table.add_row("LM", lm["name"], str(lm["gpus"]), f"{tokens:.3g}", f"{lm['flop']:.2g}", f"{lm['hours']:.3g}")
    for one in plan["retrievers"]:
        role = "queries" if one["is_indexed"] else "embedding"
        cells = (f"{one['tokens']:.3g}", f"{one['flop']:.2g}", f"{one['hours']:.3g}")
        table.add_row(f"{role} ({one['name']})", one["path"], "1", *cells)
    return table
