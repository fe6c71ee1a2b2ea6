"""Which GPUs do what: every split of them over scoring, indexing and training, and the one that ends soonest.

Few enough to count them all. A bound orders them, the simulation decides among the first.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from replug.configs.errors import UserError
from replug.planning import memory
from replug.planning.accelerators import Devices
from replug.planning.estimate import (
    Durations,
    Estimate,
    Job,
    Rates,
    Split,
    device_gb,
    durations_of,
    estimate,
    memory_of,
    rates_of,
)

SIMULATED = 3  # of the splits with the least bounds
ROLES_OF_GPUS = ("score", "embed", "train")


def best_split(job: Job, devices: Devices, efficiency: float | None = None) -> Estimate:
    """The split with the least wall time among those whose memory fits. Raises UserError where none does."""
    fitting = fitting_splits(job, devices)
    if not fitting:
        raise UserError(_does_not_fit(job, devices))
    by_bound = sorted(fitting, key=lambda split: (_bound_of(job, devices, split, efficiency), _order(split)))
    found = [estimate_split(job, devices, split, efficiency) for split in by_bound[:SIMULATED]]
    return min(found, key=lambda one: (one.simulated.times.wall, _order(one.split)))


def estimate_split(job: Job, devices: Devices, split: Split, efficiency: float | None = None) -> Estimate:
    return estimate(job, rates_of(devices, job.config, efficiency, split.search_on_gpu), devices, split)


def given_split(job: Job, devices: Devices, text: str) -> Split:
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
    """All splits that leave no GPU unused and fit the memory."""
    fitted = (_fitted(job, devices, split) for split in _splits(job, devices))
    return [split for split in fitted if split is not None]


def gpus_per_replica(job: Job, devices: Devices) -> int:
    """GPUs that hold one LM, or as many as the configuration gives it."""
    whole = memory_of(job, devices.accelerator, Split(1, 1, 1)).score * 1e9
    return max(memory.gpus_for(whole, devices.accelerator.memory_gb), int(job.config.lm.gpus_per_replica))


def _splits(job: Job, devices: Devices) -> Iterator[Split]:
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


def _fitted(job: Job, devices: Devices, split: Split) -> Split | None:
    """With searches on the GPUs of the index and activations kept where memory allows it; None where it does not."""
    recomputes = (True,) if job.shape.step.recompute else (False, True)
    ways = [(on_gpu, recompute) for recompute in recomputes for on_gpu in (True, False)]
    choices = (replace(split, search_on_gpu=on_gpu, recompute=recompute) for on_gpu, recompute in ways)
    return next((choice for choice in choices if _fits(job, devices, choice)), None)


def _fits(job: Job, devices: Devices, split: Split) -> bool:
    limit = devices.accelerator.memory_gb
    return split.replicas >= 1 and all(
        memory.fits(gb * 1e9, limit) for gb in device_gb(job, devices.accelerator, split).values()
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
