"""The trainer's other ranks: Ray actors that run the same fit, joined by Lightning's DDP.

Rank 0 is the process that was started; it alone retrieves, scores, refreshes and writes. The others are on whichever
node has room, so one command trains on one machine or many. Each rank counts as a node of its own for Lightning,
which then need not know how many there are on which machine.

A rank that died breaks its connections, and Ray reports it. A rank that hangs is found by the time-out that gloo and
NCCL have for the gradient's collective (`COLLECTIVE_PATIENCE`), as is one whose death a GPU does not notice.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import ray
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from ray.exceptions import RayError
from torch.distributed import TCPStore

from replug.cluster.actor_pool import thread_env
from replug.cluster.environment import use_interface_of
from replug.cluster.layout import TRAINER
from replug.cluster.places import device_of, gpu_of_rank_0, keep_to_memory_bound, memory_bound, place
from replug.config.errors import RunError
from replug.data.records import ScoredBatch
from replug.train.module import Batches

# All waits between ranks but that for a batch: to meet at the start, for the gradient, while rank 0 copies a
# checkpoint's state. All ranks do the same work between them, but for compiling and for loading from a slow disk.
COLLECTIVE_PATIENCE = timedelta(minutes=10)
# Other ranks wait for a batch as long as rank 0 waits for the LM or for a refresh, which have time limits of their own.
BATCH_PATIENCE = timedelta(days=30)
LOOK_SECONDS, EXPLAIN_SECONDS = 1.0, 10.0
FINISH_SECONDS = 120.0  # for the others to end after rank 0 did


class RankEnvironment(LightningEnvironment):
    """Tells Lightning which rank this process is; `device` is its GPU among those that it sees."""

    def __init__(self, rank: int, ranks: int, address: str, port: int, device: int = 0) -> None:
        super().__init__()
        self.set_world_size(ranks)
        self.rank, self._address, self._port, self.device = rank, address, port, device
        self.store: TCPStore | None = None  # where this process opened it

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
    """DDP whose ranks meet in the store of rank 0, which listens on one address only.

    A user's callbacks are on rank 0 alone, so the ranks that they ask together are that one.
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
        device = device_of(gpu_of_rank_0(gpus)) if gpus else 0
        keep_to_memory_bound(memory_bound(TRAINER, 0), device)
        self.environment = RankEnvironment(0, ranks, address, store.port, device)
        self.environment.store = store
        actor, env = ray.remote(TrainerRank), thread_env(threads)["env_vars"]
        options = [place(TRAINER, rank, gpus, env) for rank in range(1, ranks)]
        self._actors: list[Any] = [actor.options(**own).remote() for own in options]
        self._fits: dict[Any, int] = {
            own.run.remote(fit, RankEnvironment(rank, ranks, address, store.port)): rank
            for rank, own in enumerate(self._actors, 1)
        }
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ranks")
        self._watcher.start()

    def check(self) -> None:
        """Raise RuntimeError where one has ended by an error: the newest checkpoint is what counts."""
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
        """Return why a connection broke, given a moment to show; a collective has a time limit too."""
        problem, end = self._problem(), time.monotonic() + EXPLAIN_SECONDS
        while self._fits and not problem and time.monotonic() < end:
            time.sleep(0.2)
            problem = self._problem()
        if not problem and self._fits and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            problem = f"the trainer's ranks do not reach each other: {str(error).splitlines()[0]}"
        return RunError(f"{problem}; the same command goes on from the newest checkpoint") if problem else error

    def _wait(self, seconds: float) -> tuple[list[Any], list[Any]]:
        """Return the fits that have ended and those that have not, after so many seconds at most."""
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
    """Start ranks 1 to `ranks` - 1 on `fit`; raises RunError naming the rank whose death ended the block."""
    others = OtherRanks(fit, ranks, gpus, threads)
    try:
        yield others
        others.finish()
    except RunError:
        raise
    except RuntimeError as error:  # what torch says of a lost connection, or `check`
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
    """Carries what `source` gives on rank 0 to all ranks, and that it has ended; the others have no source.

    Over gloo: a broadcast that waits must not keep a GPU busy. Opened where the ranks have just met: rank 0 may then
    take hours to its first batch.
    """

    def __init__(self, source: Batches | None = None) -> None:
        self._source, self._group = source, None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the group, which all ranks do at once."""
        self._group = dist.new_group(backend="gloo", timeout=BATCH_PATIENCE)
        self._share_end(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_end(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *step: Any) -> None:
        self._share_end(trainer)

    def _share_end(self, trainer: pl.Trainer) -> None:
        """End all ranks where rank 0 ends: its other callbacks, which are called before, ask for it."""
        messages = [trainer.should_stop]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        trainer.should_stop = messages[0]

    def take(self, step: int) -> ScoredBatch:
        messages = [self._source.take(step) if self._source is not None else None]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        assert messages[0] is not None
        return messages[0]
