"""Which GPUs do what: every split of them over scoring, indexing and training, and the one that ends soonest.

Few enough to count them all. A bound orders them, the layout says whether they fit (`cluster.layout`, as a run asks
it), and the simulation decides among the first.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replug.cluster.gpu_shares import all_shared
from replug.cluster.layout import Layout, index_actors, lay_out
from replug.cluster.packing import BUILDER, SCORER, SEARCHER, TRAINER, Node
from replug.config.errors import UserError
from replug.config.schema import Config
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
from replug.planning.pace import step_of
from replug.planning.simulate import SharedGPUs

# Of layouts with the least bounds, so many are simulated, by whether they share GPUs; none whose bound is so far above
# the best so far that no simulation was seen to make it good. A bound of a split is nearly what its simulation gives.
SIMULATED = {True: 10, False: 3}
LEAST_OF_BOUND = {True: 0.65, False: 0.97}
ROLES_OF_GPUS = ("score", "embed", "train")
RESOURCES = {"train": "train", "score": "score", "index": "embed"}  # keys of `resources`, and whose they are


@dataclass(frozen=True)
class LaidSplit:
    """A split, the keys that make a run of it, and the layout that these give."""

    split: Split
    settings: dict[str, Any]
    layout: Layout


@dataclass(frozen=True)
class SplitRoom:
    """Where a split is to fit. Only a plan `may_recompute` activations, which is a key of its own."""

    nodes: Sequence[Node]
    may_recompute: bool = True


def best_split(
    job: Job, devices: Devices, efficiency: float | None = None, room: SplitRoom | None = None
) -> tuple[LaidSplit, Estimate]:
    """The split with the least wall time among those that the layout has room for. Raises UserError without one.

    Those in which roles share GPUs come first, since their simulation is short.
    """
    room, splits, best = room or SplitRoom(nodes_of(devices)), list(_splits(job, devices)), None
    for is_shared in (True, False):
        kind = [split for split in splits if _is_shared(split, devices) is is_shared]
        for bound, laid in _best_few(job, devices, kind, efficiency, room, SIMULATED[is_shared]):
            if best is None or LEAST_OF_BOUND[is_shared] * bound <= best[0]:
                found = estimate_split(job, devices, laid.split, efficiency)
                candidate = (found.simulated.times.wall, _order(laid.split), laid, found)
                best = candidate if best is None or candidate[:2] < best[:2] else best
    if best is None:
        raise UserError(_does_not_fit(job, devices))
    return best[2:]


def _best_few(
    job: Job, devices: Devices, splits: list[Split], efficiency: float | None, room: SplitRoom, most: int
) -> list[tuple[float, LaidSplit]]:
    """At most so many that are worth a simulation, with their bounds.

    Those with a better bound are laid out first; where that cannot change the best few any more, no others are.
    """
    hoped = {split: _bound_of(job, devices, replace(split, search_on_gpu=True), efficiency) for split in splits}
    found: list[tuple[float, tuple, LaidSplit]] = []
    for split in sorted(splits, key=lambda split: (hoped[split], _order(split))):
        if len(found) >= most and found[most - 1][0] < hoped[split]:
            break
        if (laid := _fitted(job, devices, split, room)) is not None:
            found.append((_bound_of(job, devices, laid.split, efficiency), _order(split), laid))
            found.sort(key=lambda one: one[:2])
    return [(bound, laid) for bound, _, laid in found[:most]]


def estimate_split(job: Job, devices: Devices, split: Split, efficiency: float | None = None) -> Estimate:
    return estimate(job, rates_of(devices, job.config, efficiency, split.search_on_gpu), devices, split)


def given_split(job: Job, devices: Devices, text: str) -> LaidSplit:
    """`--split SCORE/EMBED/TRAIN`. Raises UserError where it is none, is too large, or does not fit the memory."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)", text.strip())
    if not found:
        raise UserError(f"--split is {text!r}; expected GPUs that score, embed and train, such as 6/1/1")
    score, embed, train = (int(count) for count in found.groups())
    if (most := max(score, embed, train)) > devices.count:
        raise UserError(f"--split is {text}, which takes {most} GPUs for one role; --gpus {devices} has fewer")
    if job.shape.step.batch_size % train:
        raise UserError(
            f"--split is {text}: {train} GPUs cannot share train.batch_size={job.shape.step.batch_size} evenly; "
            "expected a divisor"
        )
    split = Split(score, embed, train, gpus_per_replica=gpus_per_replica(job, devices))
    fitting = _fitted(job, devices, split, SplitRoom(nodes_of(devices)))
    if fitting is None:
        raise UserError(f"--split is {text}: {_does_not_fit(job, devices)}")
    return fitting


def fitting_splits(job: Job, devices: Devices) -> list[Split]:
    """All splits that leave no GPU unused and that the layout has room for, with shared GPUs and without."""
    room = SplitRoom(nodes_of(devices))
    fitted = (_fitted(job, devices, split, room) for split in _splits(job, devices))
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

    if count > 1 and together == 1 and job.config.lm.path:
        for gpus in all_shared(count, job.shape.step.batch_size // job.shape.step.micro_batches):
            if sum(gpus.values()) > count:
                yield Split(int(gpus["score"]), int(gpus["index"]), int(gpus["train"]))


def _is_shared(split: Split, devices: Devices) -> bool:
    """Whether roles have more GPUs in all than there are."""
    return not split.shared and split.score + split.embed + split.train > devices.count


def _fitted(job: Job, devices: Devices, split: Split, room: SplitRoom) -> LaidSplit | None:
    """With activations kept where memory allows it, and searches where the layout puts them; None without room."""
    recomputes = job.shape.step.recompute
    for recompute in (True,) if recomputes else (False, True) if room.may_recompute else (False,):
        settings = settings_of(job.config, replace(split, recompute=recompute))
        config = _with(job.config, settings)
        try:
            layout = lay_out(config, room.nodes, sizes_on(job, devices.accelerator, config))
        except UserError:
            continue
        if split.replicas >= 1 and not layout.num_waiting:
            return LaidSplit(_searched(split, layout, recompute), settings, layout)
    return None


def _searched(split: Split, layout: Layout, recompute: bool) -> Split:
    """With what the layout decided."""
    index = index_actors(layout.config.index)
    return replace(
        split,
        search_on_gpu=index.gpus_per_searcher > 0,
        num_searchers=index.num_shards,
        num_builders=min(split.embed, index.num_builders),
        recompute=recompute,
        placed=None if split.shared else _placed(layout),
    )


def _placed(layout: Layout) -> SharedGPUs | None:
    """Who is on which GPU, where roles share several; None where they do not."""
    if not any(gpu.has(SCORER) and len(gpu.actors) > 1 for gpu in layout.gpus):
        return None
    at = {(actor.key, actor.number): number for number, gpu in enumerate(layout.gpus) for actor in gpu.actors}

    def of(key: str) -> tuple[int, ...]:
        return tuple(at[place] for place in sorted(at) if place[0] == key)

    return SharedGPUs(score=of(SCORER), embed=of(BUILDER), train=of(TRAINER), search=of(SEARCHER))


def _bound_of(job: Job, devices: Devices, split: Split, efficiency: float | None) -> float:
    rates: Rates = rates_of(devices, job.config, efficiency, split.search_on_gpu)
    durations = durations_of(job, rates, devices, split)
    if not _is_shared(split, devices):
        return wall_bound(job, durations, split)
    gpus = {"train": split.train, "score": split.score, "index": split.embed}
    step = step_of(job, devices.accelerator, efficiency or devices.accelerator.efficiency)
    pace = max(step.pace(gpus, devices.count, devices.count / devices.nodes), durations.search)
    return durations.stages.first_build + job.shape.steps * pace + durations.stages.last_build


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
