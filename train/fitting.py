"""One fit: Lightning's trainer on a source of batches, on rank 0 and on the others.

Rank 0 has the source and the files. The other ranks have the module and the data, and receive batches.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.gpu_shares import trains_on_gpu
from replug.cluster.gpus import num_gpus
from replug.cluster.interruption import Interruption, ignore_signals
from replug.cluster.layout import num_ranks
from replug.config.choices import LMScore
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.models.build import load_encoder, located
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.train.callbacks import OwnSettings, StepBoundary, TemperatureCheck
from replug.train.checkpoints import KEPT_CHECKPOINTS, Checkpointer, CheckpointWriter
from replug.train.development import Watch
from replug.train.module import LSRModule
from replug.train.ranks import NoOthers, OtherRanks, RankEnvironment, other_ranks
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchChannel, BatchSource
from replug.train.step_metrics import DeviceShares, StepClock
from replug.train.trained_weights import choose_trained_weights, freeze_sides
from replug.train.trainer import lightning_trainer, quieten_lightning, require_all_steps, run_trainer

log = logging.getLogger(__name__)


def fit(
    config: Config,
    run: RunDirectory,
    module: LSRModule,
    watch: Watch,
    newest: CheckpointMark | None,
    loggers: list[Logger],
    clock: StepClock,
    interruption: Interruption,
    source: BatchSource,
    others: OtherRanks | NoOthers,
    check: Callable[[], None],
) -> int:
    """Train from the newest whole checkpoint to the last step; returns how many steps were done.

    `check` raises what ends the run. Raises Interrupted where a signal asked for it, RunError where the run cannot go
    on; both have saved the step.
    """
    with CheckpointWriter(run, KEPT_CHECKPOINTS, newest.step if newest else 0) as writer:
        callbacks = [  # in the order they act
            OwnSettings(interruption.install, available_cores()),
            StepBoundary(source, clock, check),
            watch,
            *([DeviceShares(run.device_use, config.train.max_steps, others.devices)] if others.devices() else []),
            TemperatureCheck(config.loss),
            Checkpointer(writer, source, config.checkpoint.every_steps, clock),
        ]
        module.attach(source)
        if others.num_others:
            channel = BatchChannel(source)
            callbacks.append(channel)
            module.attach(channel)
        trainer = lightning_trainer(config, run.path, callbacks, loggers, others.environment)
        run.forget_after(newest.step if newest else 0)
        if newest:
            log.info(f"resuming at step {newest.step}")
        with interruption.deferred(lambda: f"{others.silence}step {writer.newest_step} is the newest that is saved"):
            run_trainer(trainer, config, module, newest.path if newest else None)
            if not watch.is_over:
                require_all_steps(trainer, config)
            interruption.check()  # a signal that came during the last step; its checkpoint is there
    return trainer.global_step


@contextmanager
def started_ranks(
    config: Config, run: RunDirectory, data: PreparedSet, newest: CheckpointMark | None
) -> Iterator[OtherRanks]:
    """Start the other ranks, which wait for batches; Ray must run. Paths are absolute, for other machines."""
    fit_other = partial(
        fit_as_other_rank,
        replace(config, retriever=located(config.retriever)),
        run.path.absolute(),
        data.folder.absolute(),
        newest.path.absolute() if newest else None,
    )
    gpus = min(1.0, float(config.resources.train)) if trains_on_gpu(config, num_gpus() > 0) else 0.0
    with other_ranks(fit_other, num_ranks(config), gpus, available_cores()) as others:
        yield others


def fit_as_other_rank(
    config: Config, run: Path, prepared: Path, checkpoint: Path | None, environment: RankEnvironment
) -> None:
    """Run the same fit in an actor of `ranks`, fed by rank 0. If rank 0 ends early, the actor is killed."""
    quieten_lightning()
    torch.set_num_threads(available_cores())
    encoder = load_encoder(config.retriever, dims=config.index.dims)
    module = lsr_module(config, encoder, PreparedSet(prepared))
    channel = BatchChannel()
    module.attach(channel)
    callbacks = [OwnSettings(ignore_signals, available_cores()), channel]
    run_trainer(lightning_trainer(config, run, callbacks, [], environment), config, module, checkpoint)


def lsr_module(config: Config, encoder: Encoder, data: PreparedSet) -> LSRModule:
    """`encoder` is trained, of a pair the side that is asked for.

    Where one encoder has both sides and documents stay as they are, a copy of it as it is encodes them. The loss's
    prefixes are `retriever.dims`, the most first, or by default the dimensions that the index searches.
    """
    if config.loss.in_batch and (ranks := num_ranks(config) if config.resources.train != "auto" else 1) > 1:
        raise UserError(f"loss.in_batch: {ranks} ranks each have other documents in their batch; expected one")
    documents = freeze_sides(config.retriever.train, encoder)
    if config.loss.lm_score is LMScore.probability:
        log.warning("loss.lm_score=probability underflows beyond a few tokens and makes Q uniform; try mean_logprob")
    train = config.train
    encoder.prepare_training(config.retriever.dropout, train.gradient_checkpointing, train.chunk_tokens)
    choose_trained_weights(config, encoder)
    searched = [config.index.dims] if config.index.dims is not None else []
    dims = sorted(config.retriever.dims, reverse=True) or searched
    return LSRModule(encoder, data.queries, data.corpus, config.loss, train, dims, config.seed, documents)
