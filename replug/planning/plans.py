"""A plan: the request, the estimate of its best split, and what it says as one JSON object whose names stay."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from replug.cluster.layout import Layout
from replug.cluster.packing import NAMES, USABLE
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.index_workers.kinds import resolve_kind
from replug.planning import measured
from replug.planning.accelerators import Devices, check_efficiency, parse_devices
from replug.planning.estimate import (
    Estimate,
    Job,
    dominating,
    estimate,
    host_seconds,
    hours_at_work,
    job_of,
    memory_of,
    rates_of,
    searching,
)
from replug.planning.processors import configured_allocation, configured_split, of_actors, on_cores, threads_by_role
from replug.planning.shared_gpus import CROWDED
from replug.planning.simulate import ROLES
from replug.planning.split import best_split, estimate_split, given_split
from replug.planning.storage import StoredRetriever, run_bytes
from replug.planning.trained import trained_part
from replug.planning.workload import network_gb, searched_width, total_flop, total_tokens

# Than an exact search on processors; the first is filled in minutes, the other in hours.
FASTER_KINDS = ("pq", "ivf_pq")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the command line adds to the configuration; None is what is usual."""

    lm_parameters: float | None = None
    retriever_parameters: float | None = None
    num_documents: int | None = None
    efficiency: float | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration on so many devices, and on GPUs the layout that `settings` give a run there."""

    job: Job
    devices: Devices
    estimate: Estimate
    layout: Layout
    settings: dict[str, Any] = field(default_factory=dict)


def make_plan(
    config: Config,
    gpus: str | None,
    nodes: int | None = None,
    measured_run: Path | None = None,
    assumptions: Assumptions = Assumptions(),
) -> Plan:
    """Raises UserError for what cannot be planned, with the flag or key that fixes it."""
    check_efficiency(assumptions.efficiency)
    if measured_run is not None:
        return _measured_plan(on_cores(config), gpus, measured_run, assumptions)
    if gpus is None:
        raise UserError(
            "--gpus is missing; expected such as --gpus 8xA100, or --measured RUN_DIR for that run's machine"
        )
    devices = parse_devices(gpus, nodes)
    if devices.accelerator.is_cpu:
        return _plan_of_cores(on_cores(config), devices, assumptions)
    job = _job(config, assumptions, None)
    if assumptions.split is not None:
        laid = given_split(job, devices, assumptions.split)
        found = estimate_split(job, devices, laid.split, assumptions.efficiency)
    else:
        laid, found = best_split(job, devices, assumptions.efficiency)
    return Plan(job, devices, found, laid.layout, laid.settings)


def _job(config: Config, given: Assumptions, counted: int | None) -> Job:
    return job_of(config, given.lm_parameters, given.retriever_parameters, given.num_documents or counted)


def _plan_of_cores(layout: Layout, devices: Devices, given: Assumptions) -> Plan:
    """On processors the roles are what the configuration says, and share the cores."""
    job = _job(layout.config, given, None)
    if given.split is not None:
        raise UserError("--split is for GPUs; expected lm.num_replicas, index.num_builders and their threads instead")
    rates = of_actors(rates_of(devices, job.config, given.efficiency), threads_by_role(job.config, devices.count))
    split, allocation = configured_split(job.config), configured_allocation(job, devices.count)
    return Plan(job, devices, estimate(job, rates, devices, split, allocation), layout)


def _measured_plan(layout: Layout, gpus: str | None, path: Path, given: Assumptions) -> Plan:
    config = layout.config
    run = measured.read_run(path)
    job_then = measured.job_of_run(run, given.lm_parameters, given.retriever_parameters)
    same_data = (config.data.num_documents, config.data.source) == (
        run.config.data.num_documents,
        run.config.data.source,
    )
    job = _job(config, given, job_then.shape.num_documents if same_data else None)
    devices = measured.devices_of(run, _machines(gpus))
    allocation = configured_allocation(job, run.cores, devices.count)
    now, then = (threads_by_role(one, run.cores) for one in (config, run.config))
    rates = of_actors(measured.calibrate(run, job_then), {role: now[role] / then[role] for role in ROLES})
    return Plan(job, devices, estimate(job, rates, devices, configured_split(config), allocation), layout)


def _machines(gpus: str | None) -> int:
    found = re.fullmatch(rf"([1-9]\d*)x{measured.MEASURED}", gpus or f"1x{measured.MEASURED}")
    if not found:
        raise UserError(
            f"--gpus is {gpus!r}, but --measured gives the rates of its own machine; expected such as 2xmeasured"
        )
    return int(found.group(1))


def plan_json(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """All of a plan. The names stay as they are; `docs/planning.md` says what they are.

    `price` is in dollars for an hour of one device, all of which are held until the end.
    """
    job, found, simulated = plan.job, plan.estimate, plan.estimate.simulated
    refreshes = simulated.index.refreshes
    wall_hours = simulated.times.wall / 3600
    return {
        "devices": str(plan.devices),
        "nodes": plan.devices.nodes,
        "lm": {"name": job.lm.name, "parameters": job.lm.parameters},
        "retriever": _retriever(job),
        "documents": job.shape.num_documents,
        "tokens": asdict(total_tokens(job.shape)),
        "flop": asdict(total_flop(job.shape, job.work)),
        "hours": found.hours,
        "query_encoding_hours": job.shape.steps * found.durations.encode / 3600,
        "wall_hours": wall_hours,
        "price": price,
        "dollars": None if price is None else wall_hours * plan.devices.count * price,
        "wall": _stages(found),
        "steps_per_minute": 60 * job.shape.steps / (simulated.times.training_ended - simulated.times.steps_began),
        "dominates": dominating(job, found),
        "split": found.split.by_role(),
        "gpus_per_replica": found.split.gpus_per_replica,
        "search_on": "gpu" if found.split.search_on_gpu else "host",
        "gradient_checkpointing": found.split.recompute,
        "memory_gb": _memory(plan),
        "memory_limit_gb": plan.devices.accelerator.memory_gb,
        "gpus": gpus_by_roles(plan.layout),
        "idle": idle_shares(found),
        "waits": {cause: seconds / 3600 for cause, seconds in simulated.waits.items()},
        "index_lag": {
            "max_steps": simulated.index.max_lag_steps,
            "max_hours": simulated.index.max_lag_seconds / 3600,
            "build_hours": found.durations.build / 3600,
            "refreshes": len(refreshes),
            "skipped": len(simulated.index.skipped),
        },
        "disk_gb": disk_gb(job),
        "network_gb": _network_gb(job, found),
        "settings": settings(plan),
        "notes": notes(plan),
    }


def _retriever(job: Job) -> dict[str, Any]:
    """`learning` are the weights that have gradient and moments, those of adapters among them."""
    size = job.retriever
    return {"name": size.name, "parameters": size.parameters, "learning": trained_part(job.config, size).learning}


def _network_gb(job: Job, found: Estimate) -> dict[str, float]:
    return network_gb(job.shape, job.retriever, found.split.embed, searched_width(job.config, job.retriever.dim))


def disk_gb(job: Job) -> dict[str, float]:
    """What the run directory holds at most, by part and in total."""
    width, size = searched_width(job.config, job.retriever.dim), job.retriever
    learning = trained_part(job.config, size).learning
    retriever = StoredRetriever(width, size.parameters, size.vocabulary, learning)
    parts = run_bytes(job.config, job.shape, retriever, job.index)
    return {name: value / 1e9 for name, value in {**parts, "total": sum(parts.values())}.items()}


def _stages(found: Estimate) -> dict[str, float]:
    """Hours of the stages, one after the other."""
    durations, simulated = found.durations, found.simulated
    seconds = {
        "start_up": durations.stages.start_up,
        "first_index": simulated.times.training_began - durations.stages.start_up,
        "training": simulated.times.training_ended - simulated.times.training_began,
        "last_index": simulated.times.wall - simulated.times.training_ended - durations.stages.measure,
        "measuring": durations.stages.measure,
    }
    return {stage: value / 3600 for stage, value in seconds.items()}


def _memory(plan: Plan) -> dict[str, float]:
    """GB of one device; of `search`, all vectors, in two versions while they are swapped."""
    return asdict(memory_of(plan.job, plan.devices.accelerator, plan.estimate.split))


def idle_shares(found: Estimate) -> dict[str, float]:
    """Share of the whole run in which a role's devices do nothing of that role, nor of those that share them."""
    return {role: max(0.0, 1 - _busy_share(found, role)) for role in ROLES}


def _busy_share(found: Estimate, role: str) -> float:
    busy = sum(found.simulated.busy(one) for one in found.allocation.sharing(role))
    return busy / (found.allocation.devices(role) * found.simulated.times.wall)


def settings(plan: Plan) -> list[str]:
    """The keys that make a run of this split; none where the layout is the configuration's own."""
    return [f"{key}={str(value).lower() if value is True else f'{value:g}'}" for key, value in plan.settings.items()]


def gpus_by_roles(layout: Layout) -> list[dict[str, Any]]:
    """GPUs with the same roles and as much of their memory taken, once for each such kind, as a run lays them out."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for gpu in layout.gpus:
        roles, taken = [NAMES[actor.key] for actor in gpu.actors], round(gpu.num_bytes / 1e9, 3)
        kind = kinds.setdefault((*roles, taken), {"roles": roles, "count": 0, "gb": taken, "nodes": []})
        kind["count"] += 1
        kind["nodes"] += [gpu.node.name] if gpu.node.name not in kind["nodes"] else []
        kind["limit_gb"] = USABLE * (gpu.node.gpu_bytes or math.nan) / 1e9
    return list(kinds.values())


def notes(plan: Plan) -> list[str]:
    """What the reader should know before believing the figures."""
    return [*(plan.layout.notes if plan.layout.gpus else ()), *(t for applies, t in _possible_notes(plan) if applies)]


def _possible_notes(plan: Plan) -> list[tuple[bool, str]]:
    job, found, split = plan.job, plan.estimate, plan.estimate.split
    late = found.simulated.waits["index"] > 0.02 * found.simulated.times.wall
    most = found.durations.scoring.units * (job.shape.step.depth + 1)
    lag = job.shape.refresh.fixed_lag
    return [
        (
            late and lag is not None and lag < job.shape.refresh.every_steps,
            f"the trainer waits for refreshes; refresh.lag_steps={job.shape.refresh.every_steps} gives them longest",
        ),
        _late_searches(plan),
        (
            split.replicas > most,
            f"{split.replicas} replicas, but only {most} units of work in flight; a larger train.pipeline_depth or "
            "a smaller lm.tokens_per_batch feeds them",
        ),
        (split.recompute, "training fits with gradient checkpointing only, which is counted as a third more work"),
        (split.gpus_per_replica > 1, f"each LM is spread over {split.gpus_per_replica} GPUs, one at work at a time"),
        (bool(split.shared), f"{' and '.join(split.shared)} share one GPU in turns"),
        (
            split.placed is not None,
            f"GPUs are shared in equal time slices, which are taken to cost {1 - CROWDED:.0%} while several roles have "
            "work: no GPU has shown it yet",
        ),
        (
            plan.devices.accelerator.name == "cpu",
            "all roles share the cores; a processor's rate is a rough guess: give a short run as --measured",
        ),
        (job.config.lm.path is None, "the LM's server is counted as if it ran on the GPUs of the scoring role"),
        (
            not job.config.data.source and not job.config.data.prepared,
            "lengths of your rows are not read: they are taken to fill data.document_tokens and data.window",
        ),
    ]


def _late_searches(plan: Plan) -> tuple[bool, str]:
    """Where searches on processors set the pace, which kind would keep ahead of all else of a step."""
    job, found = plan.job, plan.estimate
    others = max(hours for role, hours in hours_at_work(job, found).items() if role != "search")
    step, now = 3600 * others / job.shape.steps, found.durations.search
    faster = ((text, seconds) for text, seconds in map(_seconds_of_kinds(plan), FASTER_KINDS) if seconds < step)
    text, seconds = next(faster, ("", 0.0))
    ahead = (
        f"{text} would take {seconds:.2g} s, and find less: every refresh measures its recall"
        if text
        else "more nodes that search (index.num_shards), or GPUs, would keep ahead"
    )
    is_late = now > step and not found.split.search_on_gpu
    return is_late, f"a batch is searched in {now:.2g} s, longer than all else of a step ({step:.2g} s): {ahead}"


def _seconds_of_kinds(plan: Plan) -> Callable[[str], tuple[str, float]]:
    """The keys of a kind and the seconds of its searches, on as many nodes as search now."""
    job, width = plan.job, searched_width(plan.job.config, plan.job.retriever.dim)
    parts = searching(plan.estimate.split, plan.devices)
    core = plan.estimate.durations.search / host_seconds(job, job.index.kind, parts)

    def of(name: str) -> tuple[str, float]:
        kind = resolve_kind(name, width, job.shape.num_documents, None, True, None)
        return f"index.kind={name} index.num_shards={parts}", core * host_seconds(job, kind, parts)

    return of
