"""Seconds of a step where roles share GPUs, by a formula: it says which layouts are worth a simulation."""

from collections.abc import Mapping
from dataclasses import dataclass

from replug.planning.accelerators import DeviceModel
from replug.planning.estimate import RECOMPUTED, RING_BETWEEN, RING_WITHIN, Job
from replug.planning.shared_gpus import CROWDED
from replug.planning.trained import GRADIENT_BYTES, trained_part

HEADROOM = 1.3  # of a rank beside others: a step also waits for units of pairs that its GPU slows down


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one GPU that a step of training takes, by what they go into; refreshes are spread over the steps.

    `exchange` is what many ranks take to sum their gradients, within a node and between nodes. `lag` is the share of
    the steps from one refresh to the next that it may take.
    """

    score: float
    embed: float
    train: float
    encode: float
    exchange: tuple[float, float] = (0.0, 0.0)
    lag: float = 1.0

    def chain(self, ranks: float, gpus_of_node: float) -> float:
        """What comes one after the other in a step: the queries of a batch, a part of it on each rank, the exchange."""
        exchange = self.exchange[ranks > gpus_of_node] * (ranks - 1) / ranks
        return self.encode + self.train / ranks + exchange

    def pace(self, gpus: Mapping[str, float], num_gpus: float, gpus_of_node: float) -> float:
        """Seconds of a step, about, where roles share GPUs: by all the work, by the chain, and by late refreshes."""
        ranks, score, index = gpus["train"], gpus["score"], gpus["index"]
        chain, others = self.chain(ranks, gpus_of_node), num_gpus - ranks
        if score <= others and index <= others:
            pace = max(chain, (self.score + self.embed) / others)
        else:
            whole = self.score + self.embed + self.encode + ranks * (chain - self.encode)
            pace = self._beside(chain, whole / num_gpus, score if score > others else 0, index if index > others else 0)
        late = max(0.0, self.embed / index - self.lag * pace / 2)  # while the trainer waits, others' GPUs are idle
        return pace + late * (1 - index / num_gpus)

    def _beside(self, chain: float, least: float, score: float, index: float) -> float:
        """By the chain on GPUs where scorers or builders, on so many each, are at work for a part of the time.

        At half their speed that is twice their work. The fixed point is found by halving.
        """
        low, high = least, max(least, 3 * HEADROOM * chain / CROWDED)
        for _ in range(20):
            pace = (low + high) / 2
            beside = (min(1.0, 2 * self.score / (score * pace)) if score else 0.0) + (
                min(1.0, 2 * self.embed / (index * pace)) if index else 0.0
            )
            low, high = (pace, high) if HEADROOM * chain * (1 + beside) / CROWDED > pace else (low, pace)
        return high


def step_of(job: Job, accelerator: DeviceModel, efficiency: float) -> StepSeconds:
    """Of one GPU, by what a step's work goes into.

    Without the first and the last index, which all builders make while nothing else runs.
    """
    config, shape, work = job.config, job.shape, job.work

    def rate(dtype: str) -> float:
        return efficiency * accelerator.peak(accelerator.resolve_dtype(dtype))

    again = 1 + (RECOMPUTED - 1) * (config.train.gradient_checkpointing + (config.train.chunk_tokens is not None))
    exchanged = 2 * GRADIENT_BYTES * trained_part(config, job.retriever).learning
    return StepSeconds(
        score=shape.step.pairs * work.pair / rate(config.lm.dtype.value),
        embed=shape.num_refreshes * shape.num_documents * work.document / rate(config.index.dtype.value) / shape.steps,
        train=again * work.train_step / rate(config.train.precision.value),
        encode=work.encode_batch / rate(config.train.query_precision.value),
        exchange=(exchanged / RING_WITHIN, exchanged / RING_BETWEEN),
        lag=1.0 if shape.refresh.fixed_lag is None else shape.refresh.fixed_lag / shape.refresh.every_steps,
    )
