"""`replug plan`: estimate the cost of a run or evaluation."""

import json
from typing import Annotated, Any

import typer

from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import SHIPPED
from replug.data.sources.shards import look_at_texts
from replug.planning.evaluations import plan_evaluation
from replug.planning.stage_plan import plan_stages
from replug.planning.tables import print_comparison, print_plan
from replug.planning.training import Assumptions, plan_training

SAME = "as given"


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    source: Source = None,
    retriever: Retriever = None,
    lm: LM = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(help="GPUs, such as 8xA100. Repeat to compare. Default for a training: this machine."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: one per eight GPUs.")] = None,
    split: Annotated[
        str | None, typer.Option(help="GPUs for score/embed/train, such as 6/1/1. Default: the fastest split.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Overrides to compare with, as one quoted string. Repeatable.")
    ] = None,
    lm_parameters: Annotated[float | None, typer.Option(help="Parameters of an unknown LM, such as 7e9.")] = None,
    retriever_parameters: Annotated[
        float | None, typer.Option(help="Parameters of an unknown encoder, such as 110e6.")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(help="Number of corpus documents, if no file exists to count.", min=1)
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Reached share of the GPUs' peak FLOP/s. Default: by role.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="Number of evaluated examples, if no file exists to count.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price in dollars per GPU hour.", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the cost of a run or evaluation: hours, memory, disk, dollars and the best split of the GPUs.

    replug plan own_data --source docs/ --retriever DIR --lm DIR
    replug plan configs/paper.yaml --gpus 8xA100 --what-if lm.path=gpt2
    replug plan configs/eval_lm.yaml retriever.path=facebook/contriever lm.path=gpt2-xl --gpus 1xA100 --price 2
    """
    given = Assumptions(lm_parameters, retriever_parameters, documents, efficiency, price, split, examples)
    is_evaluation = names_evaluation(config)
    for flag, value in {"--nodes": nodes, "--split": split}.items():
        if is_evaluation and value is not None:
            raise UserError(f"{flag} is for plans of training, and {config} is an evaluation; leave it out")
        if value is not None and not gpus:
            raise UserError(f"{flag} is given without --gpus; expected such as --gpus 8xA100 too")
    if not is_evaluation and examples is not None:
        raise UserError("--examples is given, but the configuration is one of training; expected it with an evaluation")

    def planned(devices: str | None, change: str) -> dict[str, Any]:
        changed = [*with_short_keys(overrides, source, retriever, lm), *(change.split() if change != SAME else [])]
        if is_evaluation:
            return plan_evaluation(load_evaluation_config(config, changed), devices, given)
        loaded = load_config(config, changed)
        look_at_texts(loaded)
        if devices is None or loaded.train.labels:
            return plan_stages(loaded, devices, given)
        return plan_training(loaded, devices, nodes, given)

    wanted = [(devices, change) for devices in gpus or (None,) for change in (SAME, *(what_if or []))]
    plans = [planned(devices, change) for devices, change in wanted]
    names = [change for _, change in wanted]
    if len(gpus or ()) > 1:
        names = [str(devices) if change == SAME else f"{devices}, {change}" for devices, change in wanted]
    named = list(zip(names, plans, strict=True))
    if as_json and len(plans) == 1:
        print(json.dumps(plans[0], indent=2))
    elif as_json:
        changes = [{"what_if": change, **plan} for (_, change), plan in zip(wanted, plans, strict=True)]
        print(json.dumps({"plans": changes}, indent=2))
    elif len(plans) > 1:
        print_comparison(named)
    else:
        name = config.relative_to(SHIPPED).with_suffix("") if config.is_relative_to(SHIPPED) else config
        print_plan(f"{name} on {plans[0]['devices']}", plans[0])
