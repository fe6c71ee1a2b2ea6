"""Describe nodes, actors, and the GPUs that actors are on. Pure."""

import math
from dataclasses import dataclass

# Actors are known by the key that sets their number.
TRAINER, SEARCHER, BUILDER, SCORER = "resources.train", "index.num_shards", "resources.index", "lm.num_replicas"
NAMES = {TRAINER: "trainer rank", SEARCHER: "searcher", BUILDER: "builder", SCORER: "scorer"}

USABLE = 0.92  # of a device's memory: the rest is the driver's, the allocator's gaps, one process's context
CONTEXT_BYTES = 7.2e8  # that every other process on a GPU takes: CUDA's context and cuBLAS; 0.62 to 0.72 GB on an H200


@dataclass(frozen=True, slots=True)
class Node:
    """Resources of one machine. Bytes of None are not known and not checked."""

    name: str  # no other node's
    cpus: float
    gpus: float
    gpu_bytes: float | None = None  # that are free on each of its GPUs
    memory_bytes: float | None = None  # of the machine
    is_driver: bool = False  # the command was started here
    address: str = ""
    is_exclusive: bool = False  # its GPUs take one process each

    @property
    def where(self) -> str:
        """Return the node's address, or its name."""
        return self.address or self.name


@dataclass(frozen=True, slots=True)
class Actor:
    """One process. `key` sets the number of its kind. `num_bytes` is GPU memory; None means not known."""

    key: str
    number: int
    gpus: float = 0.0
    num_bytes: float | None = None

    @property
    def bytes_per_gpu(self) -> float:
        """Return the bytes on each of its GPUs, 0 if they are not known."""
        return (self.num_bytes or 0.0) / max(1.0, self.gpus)


@dataclass(frozen=True, slots=True)
class PlannedGPU:
    """A GPU with the actors on it, or the GPUs of one actor that has several."""

    actors: tuple[Actor, ...]
    gpu_bytes: float | None = None  # free before the actors start; None means not known

    @property
    def count(self) -> int:
        return max(1, math.ceil(self.actors[0].gpus))

    @property
    def limit(self) -> float:
        """Return the bytes that actors may take."""
        return math.inf if self.gpu_bytes is None else USABLE * self.gpu_bytes

    @property
    def num_bytes(self) -> float:
        """Return the known bytes on this GPU, with the contexts of several processes."""
        return sum(actor.bytes_per_gpu for actor in self.actors) + CONTEXT_BYTES * (len(self.actors) - 1)

    def memory_bound(self, actor: Actor) -> float | None:
        """Return the bytes that torch may take: the actor's own, and a part of the rest in proportion to them.

        None where the process has the GPU for itself, where only the index is, or where a size is not known.
        """
        held = [one.num_bytes for one in self.actors]
        if self.gpu_bytes is None or None in held or len(held) < 2 or not self.has(TRAINER, SCORER):
            return None
        free = self.gpu_bytes - CONTEXT_BYTES * (len(held) + 1)  # beside all contexts, and as much of the driver
        planned = sum(one.bytes_per_gpu for one in self.actors)
        return actor.bytes_per_gpu * max(1.0, free / planned)

    def describe(self) -> str:
        """Name the actors, as `builder 0 and searcher 0`."""
        return " and ".join(f"{NAMES[actor.key]} {actor.number}" for actor in self.actors)

    def has(self, *keys: str) -> bool:
        """Return whether an actor of one of those kinds is on it."""
        return any(actor.key in keys for actor in self.actors)
