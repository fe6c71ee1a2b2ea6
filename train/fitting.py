"""One fit: Lightning's trainer on a source of batches, on rank 0 and on the others.

Rank 0 has the source and the files. The other ranks have the module and the data, and receive batches.
"""

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.environment import VARIABLES
from replug.cluster.interruption import Interruption, ignore_signals
from replug.cluster.layout import num_ranks
from replug.config.choices import Examples, LMScore
from replug.config.errors import RunError, UserError
from replug.config.rules import is_live
from replug.config.schema import Config
from replug.data.datamodule import StepDataModule
from replug.data.store import PreparedSet
from replug.models.build import load_encoder, located
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.planning.memory import KEPT_CHECKPOINTS
from replug.train.callbacks import Checkpointer, CheckpointWriter, OwnSettings, StepBoundary, TemperatureCheck
from replug.train.development import Watch
from replug.train.module import LSRModule, Queries
from replug.train.ranks import (
    COLLECTIVE_PATIENCE,
    BatchChannel,
    OtherRanks,
    OwnStoreDDP,
    RankEnvironment,
    other_ranks,
)
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchSource, uses_bf16
from replug.train.step_metrics import StepClock
from replug.train.trained_weights import prepare_encoder

log = logging.getLogger(__name__)


class Fit:
    """One training of a run, from the newest whole checkpoint to the last step, on rank 0.

    `frozen` gives vectors of documents that do not learn, `newest` is the checkpoint to resume from, `steps` counts
    finished steps.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        data: PreparedSet,
        encoder: Encoder,
        interruption: Interruption,
        callbacks: Sequence[pl.Callback] = (),
        loggers: Sequence[Logger] = (),
        queries: Queries | None = None,
    ) -> None:
        """Make `encoder` ready for training on `queries`, by default the set's texts.

        `callbacks` are a user's own.
        """
        require_one_batch(config)
        self._config, self._run, self._data, self.encoder = config, run, data, encoder
        self._queries = queries or data.queries
        self.interruption, self._callbacks, self._loggers = interruption, callbacks, loggers
        self.frozen = prepare_encoder(config, encoder, data.corpus)
        self.watch = Watch(run.best_weights, config.train.patience)
        self.newest, self.clock, self.steps = run.newest_checkpoint(), StepClock(), 0

    def run(self, source: BatchSource, check: Callable[[], None], others: OtherRanks | None = None) -> None:
        """Train on the batches of `source`; `check` raises the error that ends the run.

        Raises Interrupted after a signal, and RunError if the run cannot continue; both after saving the step.
        """
        config, run, done = self._config, self._run, self.newest.step if self.newest else 0
        with closing(CheckpointWriter(run, KEPT_CHECKPOINTS, done)) as writer:
            channel = BatchChannel(source) if others and others.environment.world_size() > 1 else None
            pairs = config.train.batch_size * config.retrieve.k if is_live(config) else 0
            callbacks = [  # in the order they act
                OwnSettings(self.interruption.install, available_cores()),
                StepBoundary(source, self.clock, check, pairs),
                self.watch,
                *([] if config.train.examples is Examples.questions else [TemperatureCheck(config.loss)]),
                *self._callbacks,
                Checkpointer(writer, source, config.checkpoint.every_steps, self.clock),
                *([channel] if channel else []),
            ]
            environment = others.environment if others else RankEnvironment(0, 1, "", 0)
            trainer = lightning_trainer(config, run.path, callbacks, list(self._loggers), environment)
            parts = (self._queries, self._data.corpus, self.frozen)
            module = LSRModule(config, self.encoder, channel or source, *parts)
            run.forget_after(done)
            if self.newest:
                log.info(f"resuming at step {done}")
            with self.interruption.deferred(lambda: f"the newest saved step is {writer.newest_step}"):
                run_trainer(trainer, config, module, self.newest.path if self.newest else None)
                self.steps = trainer.global_step
                self._check_end(trainer)
                self.interruption.check()  # for a signal during the last step, which has its checkpoint
        source.finish(self.steps)

    def _check_end(self, trainer: pl.Trainer) -> None:
        """Log why a training ended before its last step. Raises RunError if nothing requested the end."""
        ended = f"training ended after step {self.steps} of {self._config.train.max_steps}"
        if self.steps == self._config.train.max_steps:
            return
        if not trainer.should_stop:
            raise RunError(
                f"{ended} without an error; its checkpoints stay: run the same command again, or give another run_dir"
            )
        if self.watch.nothing_to_gain:
            return
        if self.watch.is_over and self.watch.last:
            log.info(f"{ended}: development {self.watch.last.measured_on} showed no more progress (train.patience)")
        else:
            names = " or ".join(type(callback).__name__ for callback in self._callbacks) or "a callback"
            log.info(f"{ended} by {names}, which set trainer.should_stop")


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
    gpus = float(torch.cuda.is_available())
    return other_ranks(fit_other, num_ranks(config), gpus, available_cores())


def fit_as_other_rank(
    config: Config, run: Path, prepared: Path, checkpoint: Path | None, environment: RankEnvironment
) -> None:
    """Run the same fit in an actor of `ranks`, fed by rank 0. If rank 0 ends early, the actor is killed."""
    with own_globals():
        torch.set_num_threads(available_cores())
        encoder, data = load_encoder(config.retriever, dims=config.index.dims), PreparedSet(prepared)
        frozen, channel = prepare_encoder(config, encoder, data.corpus), BatchChannel()
        module = LSRModule(config, encoder, channel, data.queries, data.corpus, frozen)
        callbacks = [OwnSettings(ignore_signals, available_cores()), channel]
        run_trainer(lightning_trainer(config, run, callbacks, [], environment), config, module, checkpoint)


def require_one_batch(config: Config) -> None:
    """Raise UserError for in-batch negatives over several ranks, and warn of an LM score that underflows."""
    if config.loss.contrastive and (ranks := num_ranks(config) if config.resources.train != "auto" else 1) > 1:
        raise UserError(
            f"loss.contrastive: each of {ranks} ranks sees the documents of its own share; expected one rank"
        )
    if config.loss.lm_score is LMScore.probability:
        log.warning("loss.lm_score=probability underflows beyond a few tokens and makes Q uniform; try mean_logprob")


@contextmanager
def own_globals() -> Iterator[None]:
    """Restore the settings of the process at the end of the block: threads, random states, log level, variables.

    Silences Lightning's banners, and its warnings about intended choices: eval mode without dropout, a sized iterable.
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
    train, ranks, on_gpu = config.train, environment.world_size(), torch.cuda.is_available()
    strategy: str | OwnStoreDDP = "auto"
    if ranks > 1:
        backend = "nccl" if on_gpu else "gloo"  # training changes no buffer of the encoder
        strategy = OwnStoreDDP(process_group_backend=backend, timeout=COLLECTIVE_PATIENCE, broadcast_buffers=False)
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
        plugins=[environment],  # replug starts the ranks, under SLURM too
        num_sanity_val_steps=0,
        # EarlyStopping then checks after each development measurement, not at the end of the only epoch.
        check_val_every_n_epoch=2,
    )


def run_trainer(trainer: pl.Trainer, config: Config, module: LSRModule, checkpoint: Path | None) -> None:
    """Run all steps, from a checkpoint where one is given."""
    steps = StepDataModule(config.train.max_steps, config.train.micro_batches)
    trainer.fit(module, datamodule=steps, ckpt_path=checkpoint, weights_only=True)
