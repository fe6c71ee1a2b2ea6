"""The plan of a training run as one JSON object, whose names docs/planning.md lists."""

import math
from dataclasses import dataclass
from typing import Any

from replug.cluster.layout import Layout
from replug.cluster.packing import NAMES, USABLE
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.accelerators import Devices, check_efficiency, parse_devices
from replug.planning.memory import trained_part
from replug.planning.pace import CROWDED, Job, job_of
from replug.planning.split import LaidSplit, best_split, given_split, memory_gb
from replug.planning.storage import StoredRetriever, run_bytes
from replug.planning.workload import searched_width, total_flop, total_tokens

GPUS_MISSING = "--gpus is missing; expected such as --gpus 8xA100"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the command line adds to the configuration; None means the default.

    `price` is in dollars for an hour of one GPU, `num_examples` are those of an evaluation.
    """

    lm_parameters: float | None = None
    retriever_parameters: float | None = None
    num_documents: int | None = None
    efficiency: float | None = None
    price: float | None = None
    split: str | None = None
    num_examples: int | None = None


DEFAULTS = Assumptions()


def plan_training(
    config: Config, gpus: str | None, nodes: int | None = None, given: Assumptions = DEFAULTS
) -> dict[str, Any]:
    """Plan a run. Raises UserError for what cannot be planned, with the flag or key that fixes it."""
    job, devices, laid = laid_plan(config, gpus, nodes, given)
    found, split, size = laid.estimate, laid.estimate.split, job.retriever
    return {
        "devices": str(devices),
        "nodes": devices.nodes,
        "lm": {"name": job.lm.name, "parameters": job.lm.parameters},
        "retriever": {
            "name": size.name,
            "parameters": size.parameters,
            "learning": trained_part(job.config, size).learning,  # weights that have gradient and moments
        },
        "documents": job.shape.num_documents,
        "tokens": total_tokens(job.shape),
        "flop": total_flop(job.shape, job.work),
        "hours": found.hours,
        "wall_hours": found.wall_hours,
        "price": given.price,
        "dollars": None if given.price is None else found.wall_hours * devices.count * given.price,
        "wall": found.stages,
        "step_seconds": found.step,
        "refreshes": {
            "count": job.shape.refresh.num_starts,
            "build_hours": found.seconds.build / split.builders / 3600,
            "wait_hours": found.waits / 3600,
        },
        "dominates": found.dominates,
        "split": split.by_role(),
        "gpus_per_replica": split.gpus_per_replica,
        "search_on": "gpu" if split.search_on_gpu else "host",
        "gradient_checkpointing": split.recompute,
        "memory_gb": memory_gb(job, devices.accelerator, split),
        "memory_limit_gb": devices.accelerator.memory_gb,
        "gpus": gpus_by_roles(laid.layout),
        "disk_gb": disk_gb(job),
        "settings": [
            f"{key}={str(value).lower() if value is True else f'{value:g}'}" for key, value in laid.settings.items()
        ],
        "notes": [*laid.layout.notes, *(note for applies, note in _possible_notes(job, devices, laid) if applies)],
    }


def laid_plan(
    config: Config, gpus: str | None, nodes: int | None = None, given: Assumptions = DEFAULTS
) -> tuple[Job, Devices, LaidSplit]:
    """Return the work, the GPUs, and the best split of them or the one that is given, laid out as a run would be."""
    check_efficiency(given.efficiency)
    if gpus is None:
        raise UserError(GPUS_MISSING)
    devices = parse_devices(gpus, nodes)
    job = job_of(config, given.lm_parameters, given.retriever_parameters, given.num_documents)
    if given.split is None:
        return job, devices, best_split(job, devices, given.efficiency)
    return job, devices, given_split(job, devices, given.split, given.efficiency)


def disk_gb(job: Job) -> dict[str, float]:
    """Return what the run directory holds at most, by part and in total."""
    width, size = searched_width(job.config, job.retriever.dim), job.retriever
    learning = trained_part(job.config, size).learning
    retriever = StoredRetriever(width, size.parameters, size.vocabulary, learning)
    parts = run_bytes(job.config, job.shape, retriever, job.index)
    return {name: value / 1e9 for name, value in {**parts, "total": sum(parts.values())}.items()}


def gpus_by_roles(layout: Layout) -> list[dict[str, Any]]:
    """Group the GPUs of a layout by their roles and the memory taken."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for gpu in layout.gpus:
        roles, taken = [NAMES[actor.key] for actor in gpu.actors], round(gpu.num_bytes / 1e9, 3)
        kind = kinds.setdefault((*roles, taken), {"roles": roles, "count": 0, "gb": taken, "nodes": []})
        kind["count"] += 1
        kind["nodes"] += [gpu.node.name] if gpu.node.name not in kind["nodes"] else []
        kind["limit_gb"] = USABLE * (gpu.node.gpu_bytes or math.nan) / 1e9
    return list(kinds.values())


def _possible_notes(job: Job, devices: Devices, laid: LaidSplit) -> list[tuple[bool, str]]:
    """Yield what the reader should know before believing the figures."""
    found, split, refresh = laid.estimate, laid.estimate.split, job.shape.refresh
    most, search = found.seconds.units * (job.shape.depth + 1), found.seconds.search
    lag = refresh.fixed_lag
    return [
        (
            found.waits > 0.02 * 3600 * found.wall_hours and lag is not None and lag < refresh.every_steps,
            f"the trainer waits for refreshes; refresh.lag_steps={refresh.every_steps} gives them longest",
        ),
        (
            search >= found.step and not split.search_on_gpu,
            f"a batch is searched in {search:.2g} s, longer than all else of a step: more nodes that search "
            "(index.num_shards), GPUs (resources.index), or index.kind=pq or ivf_pq, which find less, would keep ahead",
        ),
        (
            split.replicas > most,
            f"{split.replicas} replicas, but only {most} units of work in flight; a larger train.pipeline_depth or "
            "a smaller lm.tokens_per_batch feeds them",
        ),
        (split.recompute, "training fits with gradient checkpointing only, which is counted as a third more work"),
        (split.gpus_per_replica > 1, f"each LM is spread over {split.gpus_per_replica} GPUs, one at work at a time"),
        (bool(split.shared), f"{' and '.join(split.shared)} share one GPU in turns"),
        (
            split.shares(devices),
            f"GPUs are shared in equal time slices, which are taken to cost {1 - CROWDED:.0%} while several roles have "
            "work: no GPU has shown it yet",
        ),
        (job.config.lm.path is None, "the LM's server is counted as if it ran on the GPUs of the scoring role"),
        (
            not job.config.data.source and not job.config.data.prepared,
            "lengths of your rows are not read: they are taken to fill data.document_tokens and data.context_tokens",
        ),
    ]
