"""`replug plan`: estimate the cost of a run or evaluation."""

import json
from typing import Annotated

import typer

from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import SHIPPED
from replug.data.sources.shards import look_at_texts
from replug.planning.estimate import plan_training
from replug.planning.evaluations import plan_evaluation
from replug.planning.tables import print_plan


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
        loaded = load_config(config, keys)
        look_at_texts(loaded)
        planned = plan_training(loaded, gpus, nodes, documents, price)
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    name = config.relative_to(SHIPPED).with_suffix("") if config.is_relative_to(SHIPPED) else config
    print_plan(f"{name} on {planned['devices']}", planned)
