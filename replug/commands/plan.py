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
    price: Annotated[float | None, typer.Option(help="Price in dollars per GPU hour.", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the cost of a run or evaluation: LM calls, tokens, hours, memory, disk and dollars.

    replug plan own_data --source docs/ --retriever DIR --lm DIR
    replug plan configs/paper.yaml --gpus 8xA100 --price 2
    replug plan configs/eval_lm.yaml retriever.path=facebook/contriever lm.path=gpt2-xl --gpus 1xA100 --price 2
    """
    keys = with_short_keys(overrides, source, retriever, lm)
    if names_evaluation(config):
        if nodes is not None:
            raise UserError(f"--nodes is for plans of training, and {config} is an evaluation; leave it out")
        planned = plan_evaluation(load_evaluation_config(config, keys), gpus, documents, examples, price)
    else:
        if examples is not None:
            raise UserError(
                "--examples is given, but the configuration is one of training; expected it with an evaluation"
            )
        planned = plan_training(load_config(config, keys), gpus, nodes, documents, price)
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    name = config.relative_to(SHIPPED).with_suffix("") if config.is_relative_to(SHIPPED) else config
    title, is_training = f"{name} on {planned['devices']}", "stages" in planned
    console = Console()
    console.print((_stages_table if is_training else _models_table)(title, planned))
    notes = [f"note: {note}" for note in planned.get("notes", ())]
    for line in [*(_training_lines if is_training else _evaluation_lines)(planned), *notes]:
        console.print(line, highlight=False, soft_wrap=True)


def _training_lines(plan: Plan) -> list[str]:
    texts, time = plan["texts"], "hours are not known"
    if plan["wall_hours"] is not None:
        time = f"about {hours(plan['wall_hours'])}"
    placed = [
        f"GPUs: {kind['count']} x {' + '.join(kind['roles']) or 'idle'}, {kind['gb']:.1f} of {kind['limit_gb']:.1f} GB"
        for kind in plan["gpus"]
    ]
    return [
        f"texts: {texts['documents']:,} documents; {texts['queries']:,} training, {texts['dev']:,} development and "
        f"{texts['heldout']:,} held-out examples",
        f"{time} on {plan['devices']}{_cost(plan)}; {plan['lm_calls']:,} LM calls (pairs of "
        f"document and text), {plan['tokens']:.3g} tokens",
        *placed,
        f"vectors and weights in each node's memory {plan['host_gb']:.3g} GB; disk {plan['disk_gb']['total']:.3g} GB, "
        f"of it index versions {plan['disk_gb']['index_versions']:.3g} GB",
    ]


def _evaluation_lines(plan: Plan) -> list[str]:
    return [
        f"{plan['examples']:,} examples, {plan['documents']:,} documents: {plan['gpu_hours']:.3g} hours{_cost(plan)}",
        f"on {plan['devices']} at least {hours(plan['wall_hours'])}: embedding, and the LMs one after the other",
    ]


def _cost(plan: Plan) -> str:
    """Return whole dollars from ten on, cents below."""
    if plan["dollars"] is None:
        return ""
    return f", {plan['dollars']:,.0f} dollars" if plan["dollars"] >= 10 else f", {plan['dollars']:.2f} dollars"


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


def _models_table(title: str, plan: Plan) -> Table:
    table = Table("model", "GPUs", "tokens", "GPU hours", title=title)
    lms = ((lm["name"], lm["gpus"], lm["tokens_read"] + lm["tokens_generated"], lm["hours"]) for lm in plan["lms"])
    encoders = ((f"{one['path']} ({one['name']})", 1, one["tokens"], one["hours"]) for one in plan["retrievers"])
    for name, gpus, tokens, taken in (*lms, *encoders):
        table.add_row(name, str(gpus), f"{tokens:.3g}", "not known" if taken is None else f"{taken:.3g}")
    return table
