"""`replug plan`: what a run costs, before anyone pays for it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from replug.commands.command import Command, ConfigFile, Group, Overrides
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import require_picture
from replug.planning.evaluation_tables import evaluation_markdown, print_evaluation, print_evaluations
from replug.planning.evaluations import EvaluationAssumptions, evaluation_json, plan_evaluation
from replug.planning.plans import Assumptions, Plan, make_plan, plan_json
from replug.planning.tables import markdown, print_comparison, print_plan

SAME = "as given"
UNTOLD = Assumptions()


@dataclass(frozen=True, slots=True)
class Variant:
    """One plan that is asked for: overrides beside the common ones, and devices."""

    what_if: str
    gpus: str | None

    def name(self, gpus_differ: bool) -> str:
        return f"{self.gpus}, {self.what_if}" if gpus_differ and self.what_if != SAME else self._one(gpus_differ)

    def _one(self, gpus_differ: bool) -> str:
        return str(self.gpus) if gpus_differ else self.what_if


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned: a configuration on each of several devices, as it is and with each change of `what_if`."""

    config: Path
    gpus: Sequence[str] = ()
    overrides: Sequence[str] = ()
    what_if: Sequence[str] = ()
    nodes: int | None = None
    measured: Path | None = None
    assumptions: Assumptions = UNTOLD
    examples: int | None = None  # of an evaluation
    price: float | None = None  # dollars for an hour of one device


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What a rehearsal is told of the machines; None is what this one has."""

    disk_gb: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """How plans are shown; as a table for a terminal where nothing is said."""

    as_json: bool = False
    as_markdown: bool = False
    chart: Path | None = None


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[
        list[str] | None, typer.Option(help="All GPUs, such as 8xA100, or cores, 16xcpu; repeat it to compare.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes they are in (default: eight GPUs to a node).")] = None,
    split: Annotated[
        str | None, typer.Option(help="GPUs that score/embed/train, such as 6/1/1, instead of the best.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Overrides to compare with, in one string; may be repeated.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A finished run whose rates are taken; --gpus is then such as 2xmeasured.")
    ] = None,
    lm_parameters: Annotated[float | None, typer.Option(help="Of an LM that is not known, such as 7e9.")] = None,
    retriever_parameters: Annotated[float | None, typer.Option(help="Of an unknown encoder, such as 110e6.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents of the corpus, where no file tells.", min=1)] = None,
    efficiency: Annotated[float | None, typer.Option(help="Share of the peak that is reached (GPUs: 0.35).")] = None,
    examples: Annotated[
        int | None, typer.Option(help="Questions or spans of an evaluation, where no file tells.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars for an hour of one GPU.", min=0)] = None,
    chart: Annotated[Path | None, typer.Option(help="Write the time line of the first plan as a PNG.")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run it on fake GPUs with stand-ins; say what would not fit.")
    ] = False,
    disk: Annotated[
        float | None, typer.Option(help="GB under run_dir, to rehearse for (default: here).", min=0)
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GB of a node's memory, to rehearse for (default: here).", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table of a row each.")] = False,
) -> None:
    """Say what a run or an evaluation costs before anyone pays for it: hours, memory, disk, the best split of the GPUs.

    replug plan configs/paper.yaml --gpus 8xA100 --what-if lm.path=gpt2
    replug plan configs/paper.yaml --gpus 8xA100 --rehearse
    replug plan configs/eval_lm.yaml retriever.path=facebook/contriever lm.path=gpt2-xl --gpus 1xA100 --price 2
    """
    given = Assumptions(lm_parameters, retriever_parameters, documents, efficiency, split)
    request = PlanRequest(config, gpus or (), overrides or (), what_if or (), nodes, measured, given, examples, price)
    if names_evaluation(config):
        _refuse_for_evaluations(request, {"--rehearse": rehearse, "--disk": disk, "--host-memory": host_memory})
    elif examples is not None:
        raise UserError("--examples is given, but the configuration is one of training; expected it with an evaluation")
    if rehearse:
        return run_rehearsal(request, HostRoom(disk, host_memory))
    if disk is not None or host_memory is not None:
        raise UserError("--disk and --host-memory are for --rehearse; expected it beside them")
    return run_plan(request, PlanOutput(as_json, as_markdown, chart))


def _refuse_for_evaluations(request: PlanRequest, others: dict[str, Any]) -> None:
    """Options of what an evaluation does not have: a split of roles, a loop that was measured, a rehearsal."""
    own = {"--nodes": request.nodes, "--measured": request.measured, "--split": request.assumptions.split}
    for flag, value in {**own, **others}.items():
        if value not in (None, False):
            raise UserError(f"{flag} is for plans of training, and {request.config} is an evaluation; leave it out")


def run_rehearsal(request: PlanRequest, room: HostRoom) -> None:
    """Rehearse one plan. Raises RunError where something would not fit."""
    if len(request.gpus) != 1 or request.what_if or request.measured is not None:
        raise UserError("--rehearse runs one plan: expected one --gpus, such as 8xA100, no --what-if and no --measured")
    plan = _plan(request, Variant(SAME, request.gpus[0]))
    from replug.rehearsal.command import rehearse_plan  # torch and Ray

    rehearse_plan(f"{request.config} on {plan.devices}", plan, room.disk_gb, room.memory_gb)


def run_plan(request: PlanRequest, output: PlanOutput) -> None:
    """Print one plan, or compare those of several devices and overrides; the chart is the first one's."""
    if names_evaluation(request.config):
        run_evaluation_plan(request, output)
    else:
        run_training_plan(request, output)


def run_training_plan(request: PlanRequest, output: PlanOutput) -> None:
    """As `run_plan`, of a run."""
    variants = _variants(request)
    plans = [_plan(request, variant) for variant in variants]
    names = [variant.name(len(request.gpus) > 1) for variant in variants]
    named = list(zip(names, (plan_json(plan, request.price) for plan in plans), strict=True))
    if output.as_json:
        print(json.dumps(_as_json(variants, named), indent=2))
    elif output.as_markdown:
        print(markdown(named))
    else:
        _print(request.config, named)
    if output.chart is not None:
        _write_chart(output.chart, request.config, plans[0])


def _variants(request: PlanRequest) -> list[Variant]:
    devices, changes = request.gpus or (None,), (SAME, *request.what_if)
    return [Variant(change, gpus) for gpus in devices for change in changes]


def run_evaluation_plan(request: PlanRequest, output: PlanOutput) -> None:
    """As `run_plan`, of an evaluation."""
    if output.chart is not None:
        raise UserError(f"--chart draws a training run, and {request.config} is an evaluation; leave it out")
    variants = _variants(request)
    names = [variant.name(len(request.gpus) > 1) for variant in variants]
    named = [(name, _evaluation_plan(request, variant)) for name, variant in zip(names, variants, strict=True)]
    if output.as_json:
        print(json.dumps(_as_json(variants, named), indent=2))
    elif output.as_markdown:
        print(evaluation_markdown(named))
    elif len(named) > 1:
        print_evaluations(named)
    else:
        print_evaluation(f"{request.config} on {named[0][1]['devices']}", named[0][1])


def _evaluation_plan(request: PlanRequest, variant: Variant) -> dict[str, Any]:
    config = load_evaluation_config(request.config, [*request.overrides, *_changes(variant)])
    told = request.assumptions
    given = EvaluationAssumptions(
        told.lm_parameters,
        told.retriever_parameters,
        told.num_documents,
        request.examples,
        told.efficiency,
        request.price,
    )
    return evaluation_json(plan_evaluation(config, variant.gpus, given))


def _changes(variant: Variant) -> list[str]:
    return variant.what_if.split() if variant.what_if != SAME else []


def _plan(request: PlanRequest, variant: Variant) -> Plan:
    config = load_config(request.config, [*request.overrides, *_changes(variant)])
    if config.train.labels:
        raise UserError(
            "train.labels is set; expected train.labels=null: plans are of the loop that asks an LM while it trains"
        )
    return make_plan(config, variant.gpus, request.nodes, request.measured, request.assumptions)


def _as_json(variants: Sequence[Variant], named: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One plan is one object; several are a list under `plans`, each with what it is a plan of."""
    if len(named) == 1:
        return named[0][1]
    return {"plans": [{"what_if": v.what_if, **plan} for v, (_, plan) in zip(variants, named, strict=True)]}


def _print(config: Path, named: Sequence[tuple[str, dict[str, Any]]]) -> None:
    if len(named) > 1:
        return print_comparison(named)
    _, plan = named[0]
    return print_plan(f"{config} on {plan['devices']}", plan)


def _write_chart(chart: Path, config: Path, plan: Plan) -> None:
    require_picture("--chart", chart)
    from replug.planning.chart import plan_png  # matplotlib takes a second

    hours = plan.estimate.simulated.times.wall / 3600
    length = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    plan_png(chart, f"{config} on {plan.devices}: {length}, {plan.job.shape.steps:,} steps", plan)
    print(f"chart: {chart}")


COMMAND = Command(plan, Group.look, place=1)
