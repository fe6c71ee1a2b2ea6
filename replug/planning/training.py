"""Plan a training run as one JSON object (docs/planning.md) with the best split of the GPUs.

All splits over scoring, indexing and training are tried: `pace` orders them, and the layout decides which fit.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from replug.cluster.layout import Layout, index_actors, lay_out
from replug.cluster.packing import NAMES, USABLE, Node
from replug.config.choices import SwapMode
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.accelerators import DeviceModel, Devices, parse_devices
from replug.planning.memory import embedding_bytes, gpus_for, scoring_bytes, sizes_of, train_bytes
from replug.planning.pace import RANK_0, RECOMPUTED, Estimate, Job, Split, estimate, job_of
from replug.planning.workload import run_bytes, total_flop, total_tokens


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
EQUAL_HOURS = 1.02  # times the least hours: what an estimate does not tell apart
RESOURCES = {"train": "train", "score": "score", "index": "embed"}  # keys of `resources`, and their roles


@dataclass(frozen=True)
class LaidSplit:
    """An estimate of a split, the keys that make a run of it, and the layout that these give."""

    estimate: Estimate
    settings: dict[str, Any]
    layout: Layout


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
            "learning": job.trained.learning,  # weights that have gradient and moments
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
        "notes": list(_notes(job, devices, laid)),
    }


def laid_plan(
    config: Config, gpus: str | None, nodes: int | None = None, given: Assumptions = DEFAULTS
) -> tuple[Job, Devices, LaidSplit]:
    """Return the work, the GPUs, and the best split of them or the one that is given, laid out as a run would be."""
    devices = parse_devices(gpus, nodes, given.efficiency)
    job = job_of(config, given.lm_parameters, given.retriever_parameters, given.num_documents)
    if given.split is None:
        return job, devices, best_split(job, devices)
    return job, devices, given_split(job, devices, given.split)


def disk_gb(job: Job) -> dict[str, float]:
    """Return what the run directory holds at most, by part and in total."""
    parts = run_bytes(job.config, job.shape, job.retriever, job.trained.learning, job.index)
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


def _notes(job: Job, devices: Devices, laid: LaidSplit) -> Iterator[str]:
    """Yield what the reader should know before believing the figures."""
    found, split, refresh = laid.estimate, laid.estimate.split, job.shape.refresh
    yield from laid.layout.notes
    lag = refresh.every_steps if refresh.lag_steps is None else refresh.lag_steps
    if found.waits > 0.02 * 3600 * found.wall_hours and lag < refresh.every_steps:
        yield f"the trainer waits for refreshes; refresh.lag_steps={refresh.every_steps} gives them longest"
    if (search := found.seconds.search) >= found.step and not split.search_on_gpu:
        yield (
            f"a batch is searched in {search:.2g} s, longer than all else of a step: more nodes that search "
            "(index.num_shards), GPUs (resources.index), or index.kind=pq or ivf_pq, which find less, would keep ahead"
        )
    if found.dominates == RANK_0:
        yield (
            f"rank 0 needs {found.seconds.rank_0:.2g} s of its interpreter to have the pairs of a step scored, longer "
            "than all else: more GPUs would not help"
        )
    if split.recompute:
        yield f"training fits with gradient checkpointing only, whose steps take {RECOMPUTED:g} times as long"
    if job.config.lm.path is None:
        yield "the LM's server is counted as if it ran on the GPUs of the scoring role"
    if not job.config.data.source and not job.config.data.prepared:
        yield "lengths of your rows are not read: they are taken to fill data.document_tokens and data.context_tokens"


def memory_gb(job: Job, accelerator: DeviceModel, split: Split) -> dict[str, float]:
    """Return the GB of one GPU of each role; of `search`, all vectors, in two versions while they are swapped."""
    config, resolve = job.config, accelerator.resolve_dtype
    dtype = resolve(config.train.precision.value)
    kept, again = (train_bytes(job.retriever, job.shape, split.train, dtype, c, job.trained) for c in (False, True))
    versions = 2 if config.index.swap is SwapMode.double else 1
    parts = {
        "score": scoring_bytes(config.lm, job.lm, resolve) / split.gpus_per_replica,
        "embed": embedding_bytes(config, job.retriever, resolve),
        "train": kept,
        "train_checkpointed": again,
        "search": versions * job.shape.num_documents * job.index.bytes_per_vector,
    }
    return {role: value / 1e9 for role, value in parts.items()}


def best_split(job: Job, devices: Devices) -> LaidSplit:
    """Return the split with the fewest ranks that ends within 2% of the soonest. Raises UserError if none has room.

    Splits are tried in the order of their time with searches on GPUs, which is the least that they can take.
    """

    def order(split: Split) -> tuple[float, int, int, int]:
        hoped = estimate(job, devices, replace(split, search_on_gpu=True))
        return hoped.wall_hours, -split.score, split.embed, split.train

    fitting: list[LaidSplit] = []  # those that end as soon as the soonest, give or take what is equal
    least = math.inf
    ordered = [(order(split), split) for split in _splits(job, devices)]
    for hoped, split in sorted(ordered, key=lambda one: one[0]):
        fewest = min((laid.estimate.split.train for laid in fitting), default=math.inf)
        if hoped[0] >= least and split.train >= fewest:  # neither sooner nor of fewer ranks
            continue
        if hoped[0] <= EQUAL_HOURS * least and (laid := _fitted(job, devices, split)) is not None:
            least = min(least, laid.estimate.wall_hours)
            fitting = [one for one in [*fitting, laid] if one.estimate.wall_hours <= EQUAL_HOURS * least]
    if not fitting:
        raise UserError(_does_not_fit(job, devices))
    return min(fitting, key=lambda laid: (laid.estimate.split.train, laid.estimate.wall_hours))


def given_split(job: Job, devices: Devices, text: str) -> LaidSplit:
    """Lay out `--split SCORE/EMBED/TRAIN`. Raises UserError if it is malformed, too large, or does not fit."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)", text.strip())
    if not found:
        raise UserError(f"--split is {text!r}; expected GPUs that score, embed and train, such as 6/1/1")
    score, embed, train = (int(count) for count in found.groups())
    if (most := max(score, embed, train)) > devices.count:
        raise UserError(f"--split is {text}, which takes {most} GPUs for one role; --gpus {devices} has fewer")
    if job.shape.batch_size % train:
        raise UserError(
            f"--split is {text}: {train} GPUs cannot share train.batch_size={job.shape.batch_size} evenly; "
            "expected a divisor"
        )
    split = Split(score, embed, train, gpus_per_replica=gpus_per_replica(job, devices))
    fitting = _fitted(job, devices, split)
    if fitting is None:
        raise UserError(f"--split is {text}: {_does_not_fit(job, devices)}")
    return fitting


def gpus_per_replica(job: Job, devices: Devices) -> int:
    """Return the GPUs that hold one LM, or as many as the configuration gives it."""
    whole = memory_gb(job, devices.accelerator, Split(1, 1, 1))["score"] * 1e9
    return max(gpus_for(whole, devices.accelerator.memory_gb), int(job.config.lm.gpus_per_replica or 0))


def nodes_of(devices: Devices) -> list[Node]:
    """Return the nodes of the devices, with unknown memory and processors; the command runs on the first."""
    accelerator, each = devices.accelerator, devices.count // devices.nodes
    gpu_bytes = 1e9 * accelerator.memory_gb
    return [Node(f"node {n}", math.inf, each, gpu_bytes, is_driver=n == 1) for n in range(1, devices.nodes + 1)]


def _splits(job: Job, devices: Devices) -> Iterator[Split]:
    """Yield the splits that use every GPU and agree with the keys of `resources`."""
    resources = job.config.resources
    given = {role: getattr(resources, key) for key, role in RESOURCES.items() if getattr(resources, key) != "auto"}
    for split in _all_splits(job, devices):
        counts = split.by_role()
        if all(abs(counts[role] - value) < 0.01 for role, value in given.items()):
            yield split


def _all_splits(job: Job, devices: Devices) -> Iterator[Split]:
    count, together, batch = devices.count, gpus_per_replica(job, devices), job.shape.batch_size
    if count == together == 1:
        yield Split(1, 1, 1, ("score", "embed", "train"))
    if count == 2 and together == 1:
        yield Split(1, 1, 1, ("score", "embed"))
        yield Split(1, 1, 1, ("score", "train"))
    if count > together:
        yield Split((count - 1) // together * together, 1, 1, ("embed", "train"), together)
    for score in range(together, count - 1, together):
        for train in range(1, count - score):
            if batch % train == 0:
                yield Split(score, count - score - train, train, (), together)
    if count > 1 and together == 1 and job.config.lm.path:  # shared: on all GPUs, or not where a rank is
        yield Split(count, count, 1)
        yield Split(count, count - 1, 1)
        for train in range(1, count):
            if batch // job.shape.micro_batches % train == 0 and 2 * (count - train) + train > count:
                yield Split(count - train, count - train, train)


def _fitted(job: Job, devices: Devices, split: Split) -> LaidSplit | None:
    """Lay a split out, with activations kept where memory allows it; None where the layout has no room."""
    recomputes = job.config.train.gradient_checkpointing
    for recompute in (True,) if recomputes else (False, True):
        settings: dict[str, Any] = {
            f"resources.{key}": _gpus(split.by_role()[role])
            for key, role in RESOURCES.items()
            if key != "score" or job.config.lm.path  # an LM on a server has no scorers of ours
        }
        if split.gpus_per_replica > 1:
            settings["lm.gpus_per_replica"] = float(split.gpus_per_replica)
        if recompute:
            settings["train.gradient_checkpointing"] = True
        config = job.config
        for key, value in settings.items():
            section, _, name = key.partition(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        lm = job.lm if config.lm.path else None
        sizes = sizes_of(config, job.retriever, lm, job.shape.num_documents, devices.accelerator.resolve_dtype)
        try:
            layout = lay_out(config, nodes_of(devices), sizes)
        except UserError:
            continue
        if split.replicas >= 1 and not layout.num_waiting:
            index = index_actors(layout.config.index)
            laid = replace(
                split,
                search_on_gpu=index.gpus_per_searcher > 0,
                num_searchers=index.num_shards,
                num_builders=min(split.embed, index.num_builders),
                recompute=recompute,
            )
            return LaidSplit(estimate(job, devices, laid), settings, layout)
    return None


def _gpus(count: float) -> float:
    """Return a whole number of GPUs, or a share rounded down so that shares fit."""
    return int(count) if count >= 1 else math.floor(1e4 * count) / 1e4


def _does_not_fit(job: Job, devices: Devices) -> str:
    needed, together = memory_gb(job, devices.accelerator, Split(1, 1, 1)), gpus_per_replica(job, devices)
    return (
        f"{devices} do not hold the run: scoring needs {needed['score']:.0f} GB ({together} GPUs for each LM), "
        f"training {needed['train']:.0f} GB ({needed['train_checkpointed']:.0f} GB with gradient checkpointing) of "
        f"{devices.accelerator.memory_gb:g} GB each; expected more or larger GPUs, or a smaller train.batch_size"
    )
