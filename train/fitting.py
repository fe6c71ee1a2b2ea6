"""One fit: Lightning's trainer on a source of batches, on rank 0 and on the others.

Rank 0 is the process that was started; it alone retrieves, scores, refreshes and writes. The others are Ray actors that
run the same fit, joined by Lightning's DDP; they have the module and the data, and receive batches. They are on
whichever node has room, so one command trains on one machine or many. Lightning sees each rank as a separate node, so
it need not know the number of ranks on each machine.

A dead rank breaks its connections, and Ray reports it. The time-out of gloo and NCCL for the gradient's collective
(`COLLECTIVE_PATIENCE`) finds a rank that hangs, and a death that a GPU does not notice.
"""

import logging
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import ray
import torch
import torch.distributed as dist
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from ray.exceptions import RayError
from torch.distributed import TCPStore

from replug.cluster.actor_pool import thread_env
from replug.cluster.environment import VARIABLES, use_interface_of
from replug.cluster.interruption import Interruption, ignore_signals
from replug.cluster.layout import TRAINER, num_ranks
from replug.cluster.places import device_of, gpu_of_rank_0, keep_to_memory_bound, memory_bound, place
from replug.config.errors import RunError, UserError
from replug.config.rules import is_live
from replug.config.schema import Config
from replug.data.datamodule import StepDataModule
from replug.data.records import ScoredBatch
from replug.data.store import PreparedSet
from replug.models.build import load_encoder, located
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.planning.memory import KEPT_CHECKPOINTS
from replug.train.callbacks import Checkpointer, CheckpointWriter, OwnSettings, StepBoundary
from replug.train.development import Watch
from replug.train.module import Batches, LSRModule, Queries
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchSource, uses_bf16
from replug.train.step_metrics import StepClock
from replug.train.trained_weights import prepare_encoder

log = logging.getLogger(__name__)

# For all waits between ranks except for a batch: to meet at the start, for the gradient, while rank 0 copies a
# checkpoint's state. All ranks do the same work between them, except for compiling and for loading from a slow disk.
COLLECTIVE_PATIENCE = timedelta(minutes=10)
# Other ranks wait for a batch while rank 0 waits for the LM or for a refresh, which have separate time limits.
BATCH_PATIENCE = timedelta(days=30)
LOOK_SECONDS, EXPLAIN_SECONDS = 1.0, 10.0
FINISH_SECONDS = 120.0  # for the others to end after rank 0 did


# The ranks -----------------------------------------------------------------------------------------------------------


class RankEnvironment(LightningEnvironment):
    """Tells Lightning the rank of this process; `device` is its GPU among the visible ones."""

    def __init__(self, rank: int, ranks: int, address: str, port: int, device: int = 0) -> None:
        super().__init__()
        self.set_world_size(ranks)
        self.rank, self._address, self._port, self.device = rank, address, port, device
        self.store: TCPStore | None = None  # in the process that opened it

    def join(self, backend: str, timeout: timedelta, device: torch.device | None = None) -> None:
        """Become a member of the process group, through rank 0's store."""
        assert dist.is_available()
        store = self.store or TCPStore(self._address, self._port, is_master=False, timeout=timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size(), timeout=timeout, device_id=device
        )

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.rank


class OwnStoreDDP(DDPStrategy):
    """DDP through the store of rank 0, which listens on one address only.

    Loggers and most callbacks are on rank 0 alone, so their collectives involve only that rank.
    """

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def setup_distributed(self) -> None:
        """Join the process group, which Lightning then uses."""
        environment, device = self.cluster_environment, self.root_device
        assert isinstance(environment, RankEnvironment)
        if not dist.is_initialized():
            own_gpu = device if device.type == "cuda" else None
            environment.join(self._get_process_group_backend(), self._timeout or COLLECTIVE_PATIENCE, own_gpu)
        super().setup_distributed()


class TrainerRank:
    """Runs one of the other ranks, as an actor."""

    def run(self, fit: Callable[[RankEnvironment], None], environment: RankEnvironment) -> None:
        keep_to_memory_bound()
        use_interface_of(ray.util.get_node_ip_address())
        fit(environment)


class OtherRanks:
    """Starts and watches ranks 1 and up, for rank 0."""

    def __init__(self, fit: Callable[[RankEnvironment], None], ranks: int, gpus: float, threads: int) -> None:
        address = ray.util.get_node_ip_address()
        store = open_store(address)
        use_interface_of(address)
        device = device_of(gpu_of_rank_0()) if gpus else 0
        keep_to_memory_bound(memory_bound(TRAINER, 0), device)
        self.environment = RankEnvironment(0, ranks, address, store.port, device)
        self.environment.store = store
        actor, env = ray.remote(TrainerRank), thread_env(threads)["env_vars"]
        options = [place(TRAINER, rank, env) for rank in range(1, ranks)]
        self._actors: list[Any] = [actor.options(**own).remote() for own in options]
        self._fits: dict[Any, int] = {
            own.run.remote(fit, RankEnvironment(rank, ranks, address, store.port)): rank
            for rank, own in enumerate(self._actors, 1)
        }
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ranks")
        self._watcher.start()

    def check(self) -> None:
        """Raise RuntimeError if a rank has ended by an error; the newest checkpoint then counts."""
        if problem := self._problem():
            raise RuntimeError(problem)

    def finish(self) -> None:
        """Wait for the others, which end with rank 0."""
        if running := self._wait(FINISH_SECONDS)[1]:
            raise RunError(f"trainer rank {self._fits[running[0]]} does not end ({FINISH_SECONDS:g} s after rank 0)")

    def close(self) -> None:
        self._closed.set()
        self._kill()
        self._watcher.join()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        self.environment.store = None

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return the cause of a broken connection or collective, after a moment for Ray to report it."""
        problem, end = self._problem(), time.monotonic() + EXPLAIN_SECONDS
        while self._fits and not problem and time.monotonic() < end:
            time.sleep(0.2)
            problem = self._problem()
        if not problem and self._fits and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            problem = f"the trainer's ranks cannot reach each other: {str(error).splitlines()[0]}"
        return RunError(f"{problem}; the same command resumes from the newest checkpoint") if problem else error

    def _wait(self, seconds: float) -> tuple[list[Any], list[Any]]:
        """Return the fits that have ended and the running ones, after at most `seconds`."""
        fits = list(self._fits)
        return ray.wait(fits, num_returns=len(fits), timeout=seconds) if fits else ([], [])

    def _problem(self) -> str | None:
        for fit in self._wait(0)[0]:
            try:
                ray.get(fit)
            except RayError as error:
                last_line = str(error).strip().splitlines()[-1].strip()
                return f"trainer rank {self._fits[fit]} died: {last_line}"
        return None

    def _watch(self) -> None:
        """Kill all other ranks if one died, which ends the collectives that wait for it."""
        while not self._closed.wait(LOOK_SECONDS):
            if self._problem():
                self._kill()
                return

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


@contextmanager
def other_ranks(fit: Callable[[RankEnvironment], None], ranks: int, gpus: float, threads: int) -> Iterator[OtherRanks]:
    """Start ranks 1 to `ranks` - 1 on `fit`; raises RunError with the number of a rank that died."""
    others = OtherRanks(fit, ranks, gpus, threads)
    try:
        yield others
        others.finish()
    except RunError:
        raise
    except RuntimeError as error:  # from torch for a lost connection, or from `check`
        raise others.explain(error) from error
    finally:
        others.close()


def open_store(address: str) -> TCPStore:
    """Open the process group's store on a free port of this address alone: by itself torch listens on all addresses."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class BatchChannel(pl.Callback):
    """Carries the batches of rank 0's `source`, and its end, to all ranks; the others have no source.

    Uses gloo, since a waiting broadcast must not keep a GPU busy. Opens when the ranks have just met: rank 0 may then
    take hours to its first batch.
    """

    def __init__(self, source: Batches | None = None) -> None:
        self._source, self._group = source, None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the group on all ranks at once."""
        self._group = dist.new_group(backend="gloo", timeout=BATCH_PATIENCE)
        self._share_end(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_end(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *step: Any) -> None:
        self._share_end(trainer)

    def _share_end(self, trainer: pl.Trainer) -> None:
        """End all ranks with rank 0: its other callbacks, called earlier, set `should_stop`."""
        messages = [trainer.should_stop]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        trainer.should_stop = messages[0]

    def take(self, step: int) -> ScoredBatch:
        messages = [self._source.take(step) if self._source is not None else None]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        assert messages[0] is not None
        return messages[0]


# The fit -------------------------------------------------------------------------------------------------------------


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
        loggers: Sequence[Logger] = (),
        queries: Queries | None = None,
    ) -> None:
        """Make `encoder` ready for training on `queries`, by default the set's texts."""
        require_one_batch(config)
        self._config, self._run, self._data, self.encoder = config, run, data, encoder
        self._queries = queries or data.queries
        self.interruption, self._loggers = interruption, loggers
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
            with self.interruption.deferred():
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
        if not self.watch.nothing_to_gain and self.watch.last:
            log.info(f"{ended}: development {self.watch.last.measured_on} showed no more progress (train.patience)")


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
    """Raise UserError for in-batch negatives over several ranks."""
    if config.loss.contrastive and (ranks := num_ranks(config) if config.resources.train != "auto" else 1) > 1:
        raise UserError(
            f"loss.contrastive: each of {ranks} ranks sees the documents of its own share; expected one rank"
        )


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
        log_every_n_steps=1,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[environment],  # replug starts the ranks, under SLURM too
        num_sanity_val_steps=0,
    )


def run_trainer(trainer: pl.Trainer, config: Config, module: LSRModule, checkpoint: Path | None) -> None:
    """Run all steps, from a checkpoint where one is given."""
    steps = StepDataModule(config.train.max_steps, config.train.micro_batches)
    trainer.fit(module, datamodule=steps, ckpt_path=checkpoint, weights_only=True)
