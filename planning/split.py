"""Which GPUs do what: every split of them over scoring, indexing and training, and the one that ends soonest.

Few enough to count them all. A bound orders them, the layout says whether they fit (`cluster.layout`, as a run asks
it), and the simulation decides among the first.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from replug.cluster.layout import Layout, index_actors, lay_out
from replug.cluster.packing import Node
from replug.configs.errors import UserError
from replug.configs.schema import Config
from replug.planning import memory
from replug.planning.accelerators import Devices
from replug.planning.estimate import (
    Durations,
    Estimate,
    Job,
    Rates,
    Split,
    durations_of,
    estimate,
    memory_of,
    rates_of,
    sizes_on,
)

SIMULATED = 3  # of the splits with the least bounds
ROLES_OF_GPUS = ("score", "embed", "train")
RESOURCES = {"train": "train", "score": "score", "index": "embed"}  # keys of `resources`, and whose they are


@dataclass(frozen=True)
class LaidSplit:
    """A split, the keys that make a run of it, and the layout that these give."""

    split: Split
    settings: dict[str, Any]
    layout: Layout[Config]


def best_split(job: Job, devices: Devices, efficiency: float | None = None) -> tuple[LaidSplit, Estimate]:
    """The split with the least wall time among those that the layout has room for. Raises UserError without one.

    Those with a better bound are laid out first; where that cannot change the best few any more, no others are.
    """
    splits = list(_splits(job, devices))
    hoped = {split: _bound_of(job, devices, replace(split, search_on_gpu=True), efficiency) for split in splits}
    found: list[tuple[float, tuple, LaidSplit]] = []
    for split in sorted(splits, key=lambda split: (hoped[split], _order(split))):
        if len(found) >= SIMULATED and found[SIMULATED - 1][0] < hoped[split]:
            break
        if (laid := _fitted(job, devices, split)) is not None:
            found.append((_bound_of(job, devices, laid.split, efficiency), _order(split), laid))
            found.sort(key=lambda one: one[:2])
    if not found:
        raise UserError(_does_not_fit(job, devices))
    simulated = [(laid, estimate_split(job, devices, laid.split, efficiency)) for *_, laid in found[:SIMULATED]]
    return min(simulated, key=lambda one: (one[1].simulated.times.wall, _order(one[0].split)))


def estimate_split(job: Job, devices: Devices, split: Split, efficiency: float | None = None) -> Estimate:
    return estimate(job, rates_of(devices, job.config, efficiency, split.search_on_gpu), devices, split)


def given_split(job: Job, devices: Devices, text: str) -> LaidSplit:
    """`--split SCORE/EMBED/TRAIN`. Raises UserError where it is none, is too large, or does not fit the memory."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)", text.strip())
    if not found:
        raise UserError(f"--split is {text!r}; expected GPUs that score, embed and train, such as 6/1/1")
    score, embed, train = (int(count) for count in found.groups())
    if score + embed + train > devices.count:
        raise UserError(f"--split is {text}, which takes {score + embed + train} GPUs; --gpus {devices} has fewer")
    if job.shape.step.batch_size % train:
        raise UserError(
            f"--split is {text}: {train} GPUs cannot share train.batch_size={job.shape.step.batch_size} evenly; "
            "expected a divisor"
        )
    fitting = _fitted(job, devices, Split(score, embed, train, gpus_per_replica=gpus_per_replica(job, devices)))
    if fitting is None:
        raise UserError(f"--split is {text}: {_does_not_fit(job, devices)}")
    return fitting


def fitting_splits(job: Job, devices: Devices) -> list[Split]:
    """All splits that leave no GPU unused and that the layout has room for."""
    fitted = (_fitted(job, devices, split) for split in _splits(job, devices))
    return [laid.split for laid in fitted if laid is not None]


def gpus_per_replica(job: Job, devices: Devices) -> int:
    """GPUs that hold one LM, or as many as the configuration gives it."""
    whole = memory_of(job, devices.accelerator, Split(1, 1, 1)).score * 1e9
    return max(memory.gpus_for(whole, devices.accelerator.memory_gb), int(job.config.lm.gpus_per_replica or 0))


def settings_of(config: Config, split: Split) -> dict[str, Any]:
    """The keys that make a run of a split. An LM on a server has no scorers of ours."""
    roles = {key: split.by_role()[role] for key, role in RESOURCES.items() if key != "score" or config.lm.path}
    found: dict[str, Any] = {f"resources.{key}": _gpus(count) for key, count in roles.items()}
    if split.gpus_per_replica > 1:
        found["lm.gpus_per_replica"] = float(split.gpus_per_replica)
    return {**found, "train.gradient_checkpointing": True} if split.recompute else found


def nodes_of(devices: Devices) -> list[Node]:
    """The command runs on the first; memory and processors of the machines are not known."""
    accelerator, each = devices.accelerator, devices.count // devices.nodes
    gpu_bytes = 1e9 * accelerator.memory_gb
    return [Node(f"node {n}", math.inf, each, gpu_bytes, is_driver=n == 1) for n in range(1, devices.nodes + 1)]


def _gpus(count: float) -> float:
    """A whole number, or a share rounded down, so that shares fit."""
    return int(count) if count >= 1 else math.floor(1e4 * count) / 1e4


def _with(config: Config, settings: dict[str, Any]) -> Config:
    for key, value in settings.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _splits(job: Job, devices: Devices) -> Iterator[Split]:
    """Those that agree with the numbers of `resources` that are given."""
    resources = job.config.resources
    given = {role: getattr(resources, key) for key, role in RESOURCES.items() if getattr(resources, key) != "auto"}
    for split in _all_splits(job, devices):
        counts = split.by_role()
        if all(abs(counts[role] - value) < 0.01 for role, value in given.items()):
            yield split


def _all_splits(job: Job, devices: Devices) -> Iterator[Split]:
    count, together = devices.count, gpus_per_replica(job, devices)
    if count == together == 1:
        yield Split(1, 1, 1, ROLES_OF_GPUS)
    if count == 2 and together == 1:
        yield Split(1, 1, 1, ("score", "embed"))
        yield Split(1, 1, 1, ("score", "train"))
    if count > together:
        score = (count - 1) // together * together
        yield Split(score, 1, 1, ("embed", "train"), together)
    ranks = [n for n in range(1, job.shape.step.batch_size + 1) if job.shape.step.batch_size % n == 0]
    for score in range(together, count - 1, together):
        for train in (n for n in ranks if n < count - score):
            yield Split(score, count - score - train, train, (), together)


def _fitted(job: Job, devices: Devices, split: Split) -> LaidSplit | None:
    """With activations kept where memory allows it, and searches where the layout puts them; None without room."""
    for recompute in (True,) if job.shape.step.recompute else (False, True):
        settings = settings_of(job.config, replace(split, recompute=recompute))
        config = _with(job.config, settings)
        try:
            layout = lay_out(config, nodes_of(devices), sizes_on(job, devices.accelerator, config))
        except UserError:
            continue
        if split.replicas >= 1 and not layout.num_waiting:
            return LaidSplit(_searched(split, layout, recompute), settings, layout)
    return None


def _searched(split: Split, layout: Layout[Config], recompute: bool) -> Split:
    """With what the layout decided."""
    index = index_actors(layout.config.index)
    return replace(
        split,
        search_on_gpu=index.gpus_per_searcher > 0,
        num_searchers=index.num_shards,
        num_builders=min(split.embed, index.num_builders),
        recompute=recompute,
    )


def _bound_of(job: Job, devices: Devices, split: Split, efficiency: float | None) -> float:
    rates: Rates = rates_of(devices, job.config, efficiency, split.search_on_gpu)
    return wall_bound(job, durations_of(job, rates, devices, split), split)


def wall_bound(job: Job, durations: Durations, split: Split) -> float:
    """Seconds that the run takes about: the slowest of the roles sets the pace, late refreshes are waited for."""
    shape = job.shape
    step, score = durations.encode + durations.train, durations.scoring.units * durations.scoring.unit / split.replicas
    waves = -(-durations.scoring.units // split.replicas)
    latency = (step + durations.search + waves * durations.scoring.unit) / (shape.step.depth + 1)
    together = step + score if {"score", "train"} <= set(split.shared) else 0.0
    pace = max(step, score, durations.search, latency, together)
    late = durations.build - (0 if split.shared else (shape.refresh.fixed_lag or 0) * pace)
    waits = shape.num_refreshes * max(0.0, late)
    return durations.stages.first_build + shape.steps * pace + waits + durations.stages.last_build


def _order(split: Split) -> tuple[int, int, int]:
    return (-split.score, split.embed, split.train)


def _does_not_fit(job: Job, devices: Devices) -> str:
    needed = memory_of(job, devices.accelerator, Split(1, 1, 1))
    together = gpus_per_replica(job, devices)
    return (
        f"{devices} do not hold the run: scoring needs {needed.score:.0f} GB ({together} GPUs for each LM), training "
        f"{needed.train:.0f} GB ({needed.train_checkpointed:.0f} GB with gradient checkpointing) of "
        f"{devices.accelerator.memory_gb:g} GB each; expected more or larger GPUs, or a smaller train.batch_size"
    )
