"""`replug adapt`: when to retrieve, from the outcomes of evaluations on disk; no LM is asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import UserError

if TYPE_CHECKING:
    from replug.evals.adaptive.protocol import Prices

WIDTH = 150

adapt = typer.Typer(name="adapt", help="Fit when to retrieve, and report what it is worth.", no_args_is_help=True)

Folders = Annotated[list[Path], typer.Argument(help="Folders that `replug evaluate` wrote.", metavar="DIR...")]
PriceIn = Annotated[float | None, typer.Option(help="Dollars for a million tokens of prompts.", min=0)]
PriceOut = Annotated[float | None, typer.Option(help="Dollars for a million generated tokens.", min=0)]


@adapt.command()
def fit(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="The policy to write, a file of JSON.")],
    augmented: Annotated[str | None, typer.Option(help="The method with retrieval, where there are several.")] = None,
    closed: Annotated[str, typer.Option(help="The method without.")] = "none",
    signal: Annotated[str, typer.Option(help="What the policy decides by; the table compares them.")] = "popularity",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
) -> None:
    """Fit a policy to one LM's outcomes, and compare policies by every signal on the same splits.

    replug adapt fit runs/eval_popqa --augmented replug@1 --out policy.json
    """
    from rich.console import Console
    from rich.table import Table

    from replug.evals.adaptive.comparison import (
        NOTE,
        choose_pair,
        compare_policies,
        comparison_table,
        fit_policy,
        with_accuracy,
    )
    from replug.evals.adaptive.outcomes import read_answered

    prices = _prices(price_in, price_out)
    answered = read_answered(folders)
    if len(answered) > 1:
        names = ", ".join(one.name for one in answered)
        raise UserError(f"the folders are of several LMs ({names}); expected one, for a policy is for one LM")
    pair = choose_pair(answered[0], closed, augmented)
    policy = fit_policy(answered[0], pair, signal)
    compared = compare_policies(answered[0], pair)
    policy = with_accuracy(policy, compared)
    policy.save(out)
    heads, rows = comparison_table(compared, prices)
    title = f"{answered[0].name}: {pair.closed} or {pair.augmented}, {len(answered[0].ids)} questions"
    console, table = Console(width=WIDTH), Table(*heads, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(NOTE, highlight=False)
    rules = "; ".join(f"{relation}: {policy.rule(relation)}" for relation in policy.thresholds)
    said = f"retrieves by {policy.signal}: {rules}; other relations, or none given: {policy.rule()}"
    console.print(said, highlight=False)
    print(f"policy: {out}")


@adapt.command()
def report(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    price_in: PriceIn = None,
    price_out: PriceOut = None,
) -> None:
    """Write report.html, report.json and figures: where retrieval helps and harms, and what policies are worth.

    Folders of several LMs stand side by side, and the numbers of Mallen et al. (2023) beside them.

    replug adapt report runs/eval_popqa --out runs/adaptive
    """
    from replug.data.folder import sole_writer
    from replug.evals.adaptive.measured import measure_all
    from replug.evals.adaptive.outcomes import read_answered
    from replug.evals.adaptive.report import write_report

    prices = _prices(price_in, price_out)
    with sole_writer(out):
        print(f"report: {write_report(measure_all(read_answered(folders)), out, prices)}")


def _prices(price_in: float | None, price_out: float | None) -> "Prices | None":
    from replug.evals.adaptive.protocol import Prices

    if (price_in is None) != (price_out is None):
        missing = "--price-in" if price_in is None else "--price-out"
        raise UserError(f"{missing} is missing; expected both prices, or none")
    return None if price_in is None or price_out is None else Prices(price_in, price_out)


COMMAND = Command(adapt, Group.evaluate, place=3)
