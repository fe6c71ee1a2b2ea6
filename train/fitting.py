"""One fit: Lightning's trainer on a source of batches, on rank 0 and on the others.

Rank 0 has the source and the files. The other ranks have the module and the data, and receive batches.
"""

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from replug.cluster.environment import VARIABLES
from replug.cluster.gpu_shares import trains_on_gpu
from replug.cluster.gpus import num_gpus, torch_device
from replug.cluster.interruption import Interruption, ignore_signals
from replug.cluster.layout import num_ranks
from replug.config.choices import LMScore
from replug.config.errors import RunError, UserError
from replug.config.schema import Config
from replug.data.datamodule import StepDataModule
from replug.data.store import PreparedSet, StoredCorpus
from replug.models.build import load_encoder, located
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.train.callbacks import OwnSettings, StepBoundary, TemperatureCheck
from replug.train.checkpoints import KEPT_CHECKPOINTS, Checkpointer, CheckpointWriter
from replug.train.development import Watch
from replug.train.module import LSRModule
from replug.train.ranks import COLLECTIVE_PATIENCE, NoOthers, OtherRanks, RankEnvironment, other_ranks
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchChannel, BatchSource, uses_bf16
from replug.train.step_metrics import DeviceShares, StepClock
from replug.train.trained_weights import choose_trained_weights, freeze_sides

log = logging.getLogger(__name__)


def fit(
    config: Config,
    run: RunDirectory,
    own_callbacks: Sequence[pl.Callback],
    loggers: list[Logger],
    module: LSRModule,
    watch: Watch,
    newest: CheckpointMark | None,
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
    pairs = 0 if config.train.labels else config.train.batch_size * config.retrieve.k
    with CheckpointWriter(run, KEPT_CHECKPOINTS, newest.step if newest else 0) as writer:
        callbacks = [  # in the order they act
            OwnSettings(interruption.install, available_cores()),
            StepBoundary(source, clock, check, pairs),
            watch,
            *([DeviceShares(run.device_use, config.train.max_steps, others.devices)] if others.devices() else []),
            TemperatureCheck(config.loss),
            *own_callbacks,
            Checkpointer(writer, source, config.checkpoint.every_steps, clock),
        ]
        module.batches = source
        if others.num_others:
            channel = BatchChannel(source)
            callbacks.append(channel)
            module.batches = channel
        trainer = lightning_trainer(config, run.path, callbacks, loggers, others.environment)
        run.forget_after(newest.step if newest else 0)
        if newest:
            log.info(f"resuming at step {newest.step}")
        with interruption.deferred(lambda: f"step {writer.newest_step} is the newest that is saved"):
            run_trainer(trainer, config, module, newest.path if newest else None)
            if not watch.is_over and trainer.global_step != config.train.max_steps:
                raise RunError(
                    f"training ended after step {trainer.global_step} of {config.train.max_steps} without an error; "
                    "what is saved stays: run the same command again, or give another run_dir"
                )
            if trainer.global_step != config.train.max_steps:
                log.info(
                    f"training ended after step {trainer.global_step} of {config.train.max_steps}: the development "
                    "texts were predicted no better for some time (train.patience)"
                )
            interruption.check()  # a signal that came during the last step; its checkpoint is there
    return trainer.global_step


def started_ranks(
    config: Config, run: RunDirectory, data: PreparedSet, newest: CheckpointMark | None
) -> AbstractContextManager[OtherRanks]:
    """Start the other ranks, which wait for batches; Ray must run. Paths are absolute, for other machines."""
    fit_other = partial(
        fit_as_other_rank,
        replace(config, retriever=located(config.retriever)),
        run.path.absolute(),
        data.folder.absolute(),
        newest.path.absolute() if newest else None,
    )
    gpus = min(1.0, float(config.resources.train)) if trains_on_gpu(config, num_gpus() > 0) else 0.0
    return other_ranks(fit_other, num_ranks(config), gpus, available_cores())


def fit_as_other_rank(
    config: Config, run: Path, prepared: Path, checkpoint: Path | None, environment: RankEnvironment
) -> None:
    """Run the same fit in an actor of `ranks`, fed by rank 0. If rank 0 ends early, the actor is killed."""
    with own_globals():
        torch.set_num_threads(available_cores())
        encoder = load_encoder(config.retriever, dims=config.index.dims)
        module = lsr_module(config, encoder, PreparedSet(prepared))
        channel = BatchChannel()
        module.batches = channel
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
    first = config.index.dims or encoder.dims
    searched = [] if first is None else [first]
    dims = sorted(config.retriever.dims, reverse=True) or searched
    module = LSRModule(encoder, data.queries, data.corpus, config.loss, train, dims, config.seed, documents)
    if isinstance(corpus := data.corpus, StoredCorpus):
        module.vectors_of = lambda rows: torch.from_numpy(corpus.vectors(rows, encoder.similarity))
    return module


@contextmanager
def own_globals() -> Iterator[None]:
    """Put back at the end of the block what a run sets for its process: threads, random states, messages, variables.

    Lightning's banners are silenced, and its advice against what is meant: eval mode without dropout, a sized iterable.
    """
    logger, threads = logging.getLogger("pytorch_lightning"), torch.get_num_threads()
    level, drawn, variables = logger.level, random.getstate(), {name: os.environ.get(name) for name in VARIABLES}
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.filterwarnings("ignore", module="(pytorch_lightning|lightning_fabric)")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
        random.setstate(drawn)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def lightning_trainer(
    config: Config, folder: Path, callbacks: list[pl.Callback], loggers: list[Logger], environment: RankEnvironment
) -> pl.Trainer:
    """Return a trainer of one rank, on the GPU of its environment or on the processor."""
    train, ranks = config.train, environment.world_size()
    on_gpu = torch_device(trains_on_gpu(config, num_gpus() > 0)) == "cuda"
    strategy: str | DDPStrategy = "auto"
    if ranks > 1:
        strategy = _OwnStoreDDP(
            cluster_environment=environment,
            process_group_backend="nccl" if on_gpu else "gloo",
            timeout=COLLECTIVE_PATIENCE,
            broadcast_buffers=False,  # the encoder has none that training changes
        )
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[environment.device] if on_gpu else 1,
        num_nodes=ranks,
        strategy=strategy,
        precision="bf16-mixed" if uses_bf16(train.precision) else "32-true",
        max_steps=train.max_steps,
        max_epochs=1,
        accumulate_grad_batches=train.micro_batches,
        gradient_clip_val=train.gradient_clip,
        log_every_n_steps=1,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        # Under SLURM too one rank is a process of ours, not one that srun made.
        plugins=[] if ranks > 1 else [LightningEnvironment()],
        num_sanity_val_steps=0,
    )


class _OwnStoreDDP(DDPStrategy):
    """DDP whose ranks meet in the store of `ranks`, which listens on one address only."""

    def setup_distributed(self) -> None:
        """Join the process group, which Lightning then uses."""
        environment, device = self.cluster_environment, self.root_device
        assert isinstance(environment, RankEnvironment)
        if not dist.is_initialized():
            environment.join(
                self._get_process_group_backend(), COLLECTIVE_PATIENCE, device if device.type == "cuda" else None
            )
        super().setup_distributed()


def run_trainer(trainer: pl.Trainer, config: Config, module: LSRModule, checkpoint: Path | None) -> None:
    """Run all steps, from a checkpoint where one is given."""
    steps = StepDataModule(config.train.max_steps, config.train.micro_batches)
    trainer.fit(module, datamodule=steps, ckpt_path=checkpoint, weights_only=True)
