"""`replug plan`: estimate the cost of a run or evaluation."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import SHIPPED
from replug.planning.estimate import plan_training
from replug.planning.evaluations import plan_evaluation

Plan = dict[str, Any]


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    source: Source = None,
    retriever: Retriever = None,
    lm: LM = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs, such as 8xA100. Default: this machine's processors.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: one per eight GPUs.")] = None,
    documents: Annotated[
        int | None, typer.Option(help="Number of corpus documents, if no file exists to count.", min=1)
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="Number of evaluated examples, if no file exists to count.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the cost of a run: LM calls, tokens, hours, memory and disk; of an evaluation, LM calls and tokens.

    replug plan own_data --source docs/ --retriever DIR --lm DIR
    replug plan configs/paper.yaml --gpus 8xA100
    replug plan configs/eval_lm.yaml retriever.path=facebook/contriever lm.path=gpt2-xl --examples 2000
    """
    keys = with_short_keys(overrides, source, retriever, lm)
    is_evaluation = names_evaluation(config)
    given = {"--gpus": gpus, "--nodes": nodes, "--documents": documents} if is_evaluation else {"--examples": examples}
    for option in (option for option, value in given.items() if value is not None):
        kind = "an evaluation, of which examples, LM calls and tokens are planned" if is_evaluation else "a training"
        raise UserError(f"{option} is given, but {config} is the configuration of {kind}; leave it out")
    if is_evaluation:
        planned = plan_evaluation(load_evaluation_config(config, keys), examples)
    else:
        planned = plan_training(load_config(config, keys), gpus, nodes, documents)
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    if is_evaluation:
        work = f"{planned['lm_calls']:,} LM calls, {planned['tokens']:.3g} tokens"
        print(f"{planned['examples']:,} examples: at most {work}, beside demonstrations")
        return
    name = config.relative_to(SHIPPED).with_suffix("") if config.is_relative_to(SHIPPED) else config
    console = Console()
    console.print(_stages_table(f"{name} on {planned['devices']}", planned))
    for line in [*_training_lines(planned), *(f"note: {note}" for note in planned["notes"])]:
        console.print(line, highlight=False, soft_wrap=True)


def _training_lines(plan: Plan) -> list[str]:
    texts = plan["texts"]
    time = "hours are not known" if plan["wall_hours"] is None else f"about {hours(plan['wall_hours'])}"
    placed = [
        f"GPUs: {kind['count']} x {' + '.join(kind['roles']) or 'idle'}, {kind['gb']:.1f} of {kind['limit_gb']:.1f} GB"
        for kind in plan["gpus"]
    ]
    return [
        f"texts: {texts['documents']:,} documents; {texts['queries']:,} training, {texts['dev']:,} development and "
        f"{texts['heldout']:,} held-out examples",
        f"{time} on {plan['devices']}; {plan['lm_calls']:,} LM calls (pairs of document and text), "
        f"{plan['tokens']:.3g} tokens",
        *placed,
        f"vectors and weights in each node's memory {plan['host_gb']:.3g} GB; disk {plan['disk_gb']['total']:.3g} GB, "
        f"of it index versions {plan['disk_gb']['index_versions']:.3g} GB",
    ]


def hours(value: float) -> str:
    """Return hours in the unit that reads best."""
    if value >= 1:
        return f"{value:,.1f} h"
    return f"{60 * value:.1f} min" if value >= 1 / 60 else "1 min at most"


def _stages_table(title: str, plan: Plan) -> Table:
    right = [Column(name, justify="right") for name in ("LM calls", "time")]
    table = Table("stage", "work", *right, title=title)
    for stage in plan["stages"]:
        calls = f"{stage['pairs']:,}" if stage["pairs"] else ""
        time = "not known" if stage["seconds"] is None else hours(stage["seconds"] / 3600)
        table.add_row(stage["name"], stage["work"], calls, time)
    return table
