"""Which GPUs do what: every split of them over scoring, indexing and training, and the one that ends soonest.

There are few enough to count them all. `pace` orders them, and the layout that a run asks says whether they fit.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from replug.cluster.layout import Layout, index_actors, lay_out
from replug.cluster.packing import Node
from replug.config.choices import SwapMode
from replug.config.errors import UserError
from replug.planning import memory
from replug.planning.accelerators import DeviceModel, Devices
from replug.planning.pace import Estimate, Job, Split, estimate

RESOURCES = {"train": "train", "score": "score", "index": "embed"}  # keys of `resources`, and their roles


@dataclass(frozen=True)
class LaidSplit:
    """An estimate of a split, the keys that make a run of it, and the layout that these give."""

    estimate: Estimate
    settings: dict[str, Any]
    layout: Layout


def memory_gb(job: Job, accelerator: DeviceModel, split: Split) -> dict[str, float]:
    """Return the GB of one GPU of each role; of `search`, all vectors, in two versions while they are swapped."""
    config, resolve = job.config, accelerator.resolve_dtype
    part, dtype = memory.trained_part(config, job.retriever), resolve(config.train.precision.value)
    two_versions = config.index.swap is SwapMode.double
    parts = {
        "score": memory.scoring_bytes(config.lm, job.lm, resolve) / split.gpus_per_replica,
        "embed": memory.embedding_bytes(config, job.retriever, resolve),
        "train": memory.train_bytes(job.retriever, job.shape, split.train, dtype, False, part),
        "train_checkpointed": memory.train_bytes(job.retriever, job.shape, split.train, dtype, True, part),
        "search": memory.search_bytes(job.shape.num_documents, job.index.bytes_per_vector, two_versions),
    }
    return {role: value / 1e9 for role, value in parts.items()}


def best_split(job: Job, devices: Devices, efficiency: float | None = None) -> LaidSplit:
    """Return the split with the least wall time that the layout has room for. Raises UserError without one.

    Splits are tried in the order of their time with searches on GPUs, which is the least that they can take.
    """

    def order(split: Split) -> tuple[float, int, int, int]:
        hoped = estimate(job, devices, replace(split, search_on_gpu=True), efficiency)
        return hoped.wall_hours, -split.score, split.embed, split.train

    best: tuple[tuple[float, int, int, int], LaidSplit] | None = None
    ordered = [(order(split), split) for split in _splits(job, devices)]
    for hoped, split in sorted(ordered, key=lambda one: one[0]):
        if best is not None and best[0] < hoped:
            break
        if (laid := _fitted(job, devices, split, efficiency)) is not None:
            found = (laid.estimate.wall_hours, *hoped[1:])
            best = (found, laid) if best is None or found < best[0] else best
    if best is None:
        raise UserError(_does_not_fit(job, devices))
    return best[1]


def given_split(job: Job, devices: Devices, text: str, efficiency: float | None = None) -> LaidSplit:
    """Lay out `--split SCORE/EMBED/TRAIN`. Raises UserError where it is none, is too large, or does not fit."""
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
    fitting = _fitted(job, devices, split, efficiency)
    if fitting is None:
        raise UserError(f"--split is {text}: {_does_not_fit(job, devices)}")
    return fitting


def gpus_per_replica(job: Job, devices: Devices) -> int:
    """Return the GPUs that hold one LM, or as many as the configuration gives it."""
    whole = memory_gb(job, devices.accelerator, Split(1, 1, 1))["score"] * 1e9
    return max(memory.gpus_for(whole, devices.accelerator.memory_gb), int(job.config.lm.gpus_per_replica or 0))


def nodes_of(devices: Devices) -> list[Node]:
    """The command runs on the first node; memory and processors of the machines are not known."""
    accelerator, each = devices.accelerator, devices.count // devices.nodes
    gpu_bytes = 1e9 * accelerator.memory_gb
    return [Node(f"node {n}", math.inf, each, gpu_bytes, is_driver=n == 1) for n in range(1, devices.nodes + 1)]


def _splits(job: Job, devices: Devices) -> Iterator[Split]:
    """Splits that leave no GPU unused and agree with the numbers of `resources` that are given."""
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
        for train in range(1, count + 1):
            if batch // job.shape.micro_batches % train == 0:
                others = count - train
                for score, embed in ((count, count), (count, others), (others, others)):
                    if embed and score + embed + train > count:
                        yield Split(score, embed, train)


def _fitted(job: Job, devices: Devices, split: Split, efficiency: float | None) -> LaidSplit | None:
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
        sizes = memory.sizes_of(config, job.retriever, lm, job.shape.num_documents, devices.accelerator.resolve_dtype)
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
            return LaidSplit(estimate(job, devices, laid, efficiency), settings, layout)
    return None


def _gpus(count: float) -> float:
    """A whole number, or a share rounded down, so that shares fit."""
    return int(count) if count >= 1 else math.floor(1e4 * count) / 1e4


def _does_not_fit(job: Job, devices: Devices) -> str:
    needed, together = memory_gb(job, devices.accelerator, Split(1, 1, 1)), gpus_per_replica(job, devices)
    return (
        f"{devices} do not hold the run: scoring needs {needed['score']:.0f} GB ({together} GPUs for each LM), "
        f"training {needed['train']:.0f} GB ({needed['train_checkpointed']:.0f} GB with gradient checkpointing) of "
        f"{devices.accelerator.memory_gb:g} GB each; expected more or larger GPUs, or a smaller train.batch_size"
    )
