"""Place actors on nodes and GPUs by counts and memory. Pure.

Ray packs fractions of GPUs as it likes. What must lie together is an `ActorGroup`, and a GPU that holds one is reserved
for its actors as a whole (`cluster.places`); this module decides which.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Actors are known by the key that sets their number.
TRAINER, SEARCHER, BUILDER, SCORER = "resources.train", "index.num_shards", "index.num_builders", "lm.num_replicas"
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

    @property
    def gpu_limit(self) -> float:
        """Return the bytes of one GPU that actors may take."""
        return math.inf if self.gpu_bytes is None else USABLE * self.gpu_bytes


@dataclass(frozen=True, slots=True)
class Actor:
    """One process. `key` sets the number of its kind. `num_bytes` is GPU memory; None means not known."""

    key: str
    number: int
    gpus: float = 0.0
    num_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """Actors on one GPU together, or one actor on several GPUs or on none. One that `may_wait` may join later."""

    actors: tuple[Actor, ...]
    on_driver: bool = False
    may_wait: bool = False

    @property
    def key(self) -> str:
        return self.actors[0].key

    @property
    def gpus(self) -> float:
        return round(sum(actor.gpus for actor in self.actors), 4)

    @property
    def num_bytes(self) -> float:
        """Return the bytes on each of its GPUs, as far as they are known, without other actors."""
        return sum(actor.num_bytes or 0.0 for actor in self.actors) / max(1.0, self.gpus)


@dataclass(frozen=True, slots=True)
class PlannedGPU:
    """A GPU, and who is to be on it."""

    node: Node
    actors: tuple[Actor, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Return the known bytes on this GPU, with the contexts of several processes."""
        held = sum((actor.num_bytes or 0.0) / max(1.0, actor.gpus) for actor in self.actors)
        return held + CONTEXT_BYTES * max(0, len(self.actors) - 1)

    def memory_bound(self, actor: Actor) -> float | None:
        """Return the bytes that torch may take: the actor's own, and a part of the rest in proportion to them.

        None where the process has the GPU for itself, where only the index is, or where a size is not known.
        """
        held = [one.num_bytes for one in self.actors]
        if self.node.gpu_bytes is None or None in held or len(held) < 2 or not self.has(TRAINER, SCORER):
            return None
        free = self.node.gpu_bytes - CONTEXT_BYTES * (len(held) + 1)  # beside all contexts, and as much of the driver
        planned = sum(actor.num_bytes or 0.0 for actor in self.actors)
        return (actor.num_bytes or 0.0) * max(1.0, free / planned)

    def describe(self) -> str:
        """Name the actors, as `builder 0 and searcher 0`."""
        return " and ".join(f"{NAMES[actor.key]} {actor.number}" for actor in self.actors)

    @property
    def free(self) -> float:
        return round(1.0 - sum(min(1.0, actor.gpus) for actor in self.actors), 4)

    def holds(self, group: ActorGroup, by_memory: bool = True) -> bool:
        """Return whether there is room for a group, or for one GPU's part of it."""
        contexts = CONTEXT_BYTES * (len(group.actors) - (not self.actors))
        fits = not by_memory or self.num_bytes + group.num_bytes + contexts <= self.node.gpu_limit
        return self.free >= min(1.0, group.gpus) and fits

    def has(self, *keys: str) -> bool:
        """Return whether an actor of one of those kinds is on it."""
        return any(actor.key in keys for actor in self.actors)


@dataclass
class Packing:
    """What is placed so far. Whole GPUs and shares go where least is free, what needs no GPU where most CPUs are.

    Where `spread`, roles share GPUs: no two actors of a kind are on one, and those without a rank come first, since a
    step waits for its slowest rank.
    """

    nodes: Sequence[Node]
    spread: bool = False
    gpus: dict[str, list[PlannedGPU]] = field(init=False)
    cpus: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = {node.name: [PlannedGPU(node)] * int(node.gpus) for node in self.nodes}
        self.cpus = {node.name: node.cpus for node in self.nodes}

    def place(self, group: ActorGroup) -> bool:
        """Take a place. Return False if there is none."""
        found = min(self._places(group), key=lambda place: self._order(group, *place), default=None)
        if found is None:
            return False
        name, numbers = found
        self.cpus[name] -= len(group.actors)
        for number in numbers:
            gpu = self.gpus[name][number]
            self.gpus[name][number] = PlannedGPU(gpu.node, (*gpu.actors, *group.actors))
        return True

    def lacks_memory_only(self, group: ActorGroup) -> bool:
        """Return whether a group without a place would have one if GPUs were large enough."""
        return any(self._places(group, by_memory=False))

    def planned(self) -> tuple[PlannedGPU, ...]:
        return tuple(gpu for node in self.nodes for gpu in self.gpus[node.name])

    def _places(self, group: ActorGroup, by_memory: bool = True) -> Iterator[tuple[str, list[int]]]:
        """Nodes with numbers of GPUs there: each with so large a share left, or the first so many whole ones."""
        for node in self.nodes:
            if self.cpus[node.name] < len(group.actors) or (group.on_driver and not node.is_driver):
                continue
            keys = [actor.key for actor in group.actors] if self.spread else []
            held = [gpu.holds(group, by_memory) and not gpu.has(*keys) for gpu in self.gpus[node.name]]
            numbers = [number for number, is_held in enumerate(held) if is_held] if group.gpus else []
            if group.gpus == 0 or (group.gpus > 1 and len(numbers) >= group.gpus):
                yield node.name, numbers[: math.ceil(group.gpus)]
            elif group.gpus <= 1:
                yield from ((node.name, [number]) for number in numbers)

    def _order(self, group: ActorGroup, name: str, numbers: Sequence[int]) -> tuple[float, ...]:
        if not numbers:
            return 0.0, -self.cpus[name]
        gpus = [self.gpus[name][number] for number in numbers]
        if self.spread:  # ranks beside one another, which exchange gradients
            ranks = sum(gpu.has(TRAINER) for gpu in self.gpus[name]) if group.key == TRAINER else 0
            return -ranks, gpus[0].has(TRAINER), len(gpus[0].actors)
        return sum(gpu.free for gpu in gpus), sum(gpu.free for gpu in self.gpus[name])
