"""Decide which part of a cluster trains, scores and indexes: a configuration and nodes in, places and notes out. Pure.

The layout knows the GPU memory of each role (`Sizes`): exact vectors are searched on GPUs if two versions have room
there, else in host memory. `replug plan` and a run both use it. Ray chooses the nodes.

There are three layouts of GPUs: each role has separate GPUs; scoring and the index share GPUs; or all roles are on the
only GPU. `resources` with `auto`: one GPU in eight trains, and all others score and index, since the index has little
to do between refreshes. An LM that needs several GPUs does not share them: one GPU in eight then indexes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from replug.config.errors import UserError
from replug.config.schema import Config, LMConfig

# Actors are known by the key that sets their number.
TRAINER, SEARCHER, BUILDER, SCORER = "resources.train", "index.num_shards", "resources.index", "lm.num_replicas"
NAMES = {TRAINER: "trainer rank", SEARCHER: "searcher", BUILDER: "builder", SCORER: "scorer"}

USABLE = 0.92  # of a device's memory: the rest is the driver's, the allocator's gaps, one process's context
CONTEXT_BYTES = 7.2e8  # of each further process on a GPU: CUDA's context and cuBLAS; 0.62 to 0.72 GB on an H200

ROLES = ("train", "score", "index")
GPUS_PER_RANK = 8  # with `auto`, one of them trains
SMALLER = {
    TRAINER: "train.chunk_tokens=8192, or more train.micro_batches",
    SEARCHER: "more index.num_shards",
    BUILDER: "resources.score and resources.index that share no GPU",
    SCORER: "a larger lm.gpus_per_replica, or a smaller lm.tokens_per_batch",
}
EXACT_KINDS = ("flat_fp16",)  # any number of searchers can share their vectors
VERSIONS = 2  # of the index that are held during a swap
OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster started here


@dataclass(frozen=True, slots=True)
class Node:
    """Resources of one machine. None means unknown bytes, which are not checked."""

    name: str  # unique
    cpus: float
    gpus: float
    gpu_bytes: float | None = None  # free on each of its GPUs
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

        None if the process is alone on the GPU, if only the index is there, or if a size is not known.
        """
        held = [one.num_bytes for one in self.actors]
        if self.gpu_bytes is None or None in held or len(held) < 2 or not self.has(TRAINER, SCORER):
            return None
        free = self.gpu_bytes - CONTEXT_BYTES * (len(held) + 1)  # less all contexts, and one for the driver
        planned = sum(one.bytes_per_gpu for one in self.actors)
        return actor.bytes_per_gpu * max(1.0, free / planned)

    def describe(self) -> str:
        """Name the actors, as `builder 0 and searcher 0`."""
        return " and ".join(f"{NAMES[actor.key]} {actor.number}" for actor in self.actors)

    def has(self, *keys: str) -> bool:
        """Return whether an actor of one of these kinds is on this GPU."""
        return any(actor.key in keys for actor in self.actors)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that actors hold on their GPUs (`planning.memory`). None means not known; nothing is checked then."""

    vectors: float | None = None  # of one index version as it is searched, all shards together
    search: float = 0.0  # a searcher, beside its vectors
    embedding: float | None = None  # a builder: its encoder and one pass
    scoring: float | None = None  # an LM and one pass, over all its GPUs
    training: Callable[[int], float] | None = None  # of a rank, by the number of ranks


UNKNOWN = Sizes()


class NoRoom(UserError):
    """Raised for actors that find no place on the nodes."""


@dataclass(frozen=True, slots=True)
class IndexActors:
    """Numbers of the index's actors, and whether they have GPUs."""

    num_shards: int = 1
    num_builders: int = 1
    build_on_gpu: bool = False
    search_on_gpu: bool = False


@dataclass(frozen=True)
class Layout:
    """Places of all actors. `config` has a number for each of `resources` and of the scorers."""

    config: Config
    index: IndexActors
    gpus: tuple[PlannedGPU, ...]  # with actors
    actors: tuple[Actor, ...]  # on GPUs, on processors, and waiting
    num_waiting: int  # scorers without room, which join when a node does
    notes: tuple[str, ...]  # for the user

    @property
    def trains_on_gpu(self) -> bool:
        return any(actor.key == TRAINER and actor.gpus for actor in self.actors)

    @property
    def reserved(self) -> tuple[PlannedGPU, ...]:
        """Return the GPUs that are held for their actors. Scorers alone take free GPUs, also on nodes that join."""
        return tuple(gpu for gpu in self.gpus if gpu.has(TRAINER, SEARCHER, BUILDER))

    def describe(self) -> str:
        """Return one line with the number of actors and GPUs of each role."""
        kinds = dict.fromkeys((actor.key, actor.gpus) for actor in self.actors)
        counts = {kind: sum((actor.key, actor.gpus) == kind for actor in self.actors) for kind in kinds}
        return ", ".join(f"{key} {n}" + (f" x {gpus:g} GPU" if gpus else "") for (key, gpus), n in counts.items())


def lay_out(config: Config, nodes: Sequence[Node], sizes: Sizes = UNKNOWN, roles: Collection[str] = ROLES) -> Layout:
    """Return places for the actors of `roles`. Raises UserError, with numbers, where they find no room.

    One scorer is enough to begin. Exact vectors are searched on GPUs if two versions fit beside the other actors, else
    in host memory, like lossy kinds.
    """
    numbers, each = gpus_by_role(config, nodes, sizes, roles)
    config = _with_numbers(config, numbers, each, nodes, roles)
    is_exclusive = any(node.is_exclusive and node.gpus for node in nodes)
    may_search_on_gpu = numbers["index"] and config.index.kind in EXACT_KINDS and not is_exclusive
    for search_on_gpu in (True, False) if may_search_on_gpu else (False,):
        index = _index_actors(config, numbers["index"], nodes, search_on_gpu)
        gpus, elsewhere = _placed(config, numbers, nodes, sizes, roles, index)
        if all(gpu.num_bytes <= gpu.limit for gpu in gpus):
            break
    actors = [*(actor for gpu in gpus for actor in gpu.actors), *elsewhere]
    _check_gpus(gpus, is_exclusive)
    num_waiting = _num_waiting(actors, gpus, nodes)
    if "index" in roles and not search_on_gpu:
        _check_host_memory(sizes, index, nodes, "train" in roles)
    layout = Layout(config, index, gpus, tuple(actors), num_waiting, ())
    return replace(layout, notes=tuple(_notes_on(layout, nodes, sizes)))


def num_ranks(config: Config) -> int:
    """Return the trainer ranks of a configuration that is laid out."""
    return max(1, int(config.resources.train))


def scorers(lm: LMConfig) -> tuple[int, float]:
    """Return the replicas, and the GPUs of each. Defaults to one replica on processors."""
    return lm.num_replicas or 1, lm.gpus_per_replica or 0.0


def _with_numbers(
    config: Config, numbers: dict[str, range], each: int, nodes: Sequence[Node], roles: Collection[str]
) -> Config:
    """Return the configuration with a number for each of its roles: GPUs, or processes where the role has none."""
    counts = {role: len(numbers[role]) or _processes(config, role) for role in roles}
    lm, num_gpus = config.lm, len(numbers["score"])
    if lm.path and "score" in roles:
        count = lm.num_replicas or counts["score"]
        if num_gpus and lm.num_replicas is None:
            count = max(1, min(num_gpus // each, sum(int(node.gpus) // each for node in nodes)))
        if count > num_gpus > 0 and set(numbers["score"]) & {*numbers["train"], *numbers["index"]}:
            raise UserError(f"lm.num_replicas is {count}, but scoring shares {num_gpus} GPUs; expected no more")
        lm = replace(lm, num_replicas=count, gpus_per_replica=float(each) if num_gpus else 0.0)
    return replace(config, resources=replace(config.resources, **counts), lm=lm)


def _processes(config: Config, role: str) -> int:
    value = getattr(config.resources, role)
    return 1 if value == "auto" else int(value)


def _index_actors(config: Config, gpus: range, nodes: Sequence[Node], search_on_gpu: bool) -> IndexActors:
    """Return a searcher for each GPU of the index, or for each node of a cluster with GPUs.

    A lossy kind has one file part for each shard, so its default must not depend on the machines.
    """
    parts = len(gpus) if search_on_gpu else len(nodes) if any(node.gpus for node in nodes) else 1
    num_shards = config.index.num_shards or (parts if config.index.kind in EXACT_KINDS else 1)
    return IndexActors(num_shards, _processes(config, "index"), len(gpus) > 0, search_on_gpu)


def _placed(
    config: Config,
    numbers: dict[str, range],
    nodes: Sequence[Node],
    sizes: Sizes,
    roles: Collection[str],
    index: IndexActors,
) -> tuple[tuple[PlannedGPU, ...], list[Actor]]:
    """Return the GPUs with their actors, and the actors elsewhere. Rank 0's GPU, which must be here, comes first."""
    on_gpu: dict[int, list[Actor]] = {}
    elsewhere: list[Actor] = []

    def put(key: str, actors: range, gpus: range, num_bytes: float | None, each: int = 1) -> None:
        """Put one actor after the other on the GPUs of a role, or on processors; scorers beyond these wait."""
        firsts = gpus[: len(gpus) // each * each : each]
        for number in actors:
            if firsts and (number < len(firsts) or key != SCORER):
                gpu = firsts[number % len(firsts)]
                on_gpu.setdefault(gpu, []).append(Actor(key, number, float(each), num_bytes))
            else:
                elsewhere.append(Actor(key, number, float(each) if firsts else 0.0))

    if "train" in roles:
        ranks = num_ranks(config)
        # Rank 0 is the process that was started; on a processor it takes no place.
        first = 0 if numbers["train"] else 1
        training = None if sizes.training is None else sizes.training(ranks)
        put(TRAINER, range(first, ranks), numbers["train"], training)
    if "index" in roles:
        version = None if sizes.vectors is None else sizes.vectors / index.num_shards
        searching = None if version is None else VERSIONS * version + sizes.search
        put(SEARCHER, range(index.num_shards), numbers["index"] if index.search_on_gpu else range(0), searching)
        put(BUILDER, range(index.num_builders), numbers["index"], sizes.embedding)
    if config.lm.path and "score" in roles:
        replicas, each = scorers(config.lm)
        put(SCORER, range(replicas), numbers["score"], sizes.scoring, max(1, int(each)))
    free = min((node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes is not None), default=None)
    for number, actors in on_gpu.items():
        if len(actors) > 1:  # shares of a GPU in ten-thousandths, in which Ray counts
            on_gpu[number] = [replace(actor, gpus=math.floor(1e4 / len(actors)) / 1e4) for actor in actors]
    return tuple(PlannedGPU(tuple(on_gpu[number]), free) for number in sorted(on_gpu)), elsewhere


def _num_waiting(actors: Sequence[Actor], gpus: Sequence[PlannedGPU], nodes: Sequence[Node]) -> int:
    """Return the scorers that find no room. Raises NoRoom if not even one does, or another actor does not."""
    cpus = sum(node.cpus for node in nodes)
    num_scorers = sum(actor.key == SCORER for actor in actors)
    needed = len(actors) - max(0, num_scorers - 1)
    if cpus < needed:
        keys = " + ".join(dict.fromkeys(actor.key for actor in actors))
        raise NoRoom(
            f"the cluster has {cpus:g} CPUs on {len(nodes)} nodes, but the actors need at least {needed} ({keys}): "
            "ask for fewer, or add nodes"
        )
    placed = {actor for gpu in gpus for actor in gpu.actors}
    beyond_gpus = sum(actor.gpus > 0 and actor not in placed for actor in actors)
    return int(max(beyond_gpus, len(actors) - cpus, 0))


def _check_gpus(gpus: Sequence[PlannedGPU], is_exclusive: bool) -> None:
    """Raise NoRoom if a GPU's memory does not hold its actors, UserError if it takes one process only."""
    fullest = max(gpus, key=lambda gpu: gpu.num_bytes / gpu.limit, default=None)
    if fullest is not None and fullest.num_bytes > fullest.limit:
        parts = " + ".join(f"{NAMES[actor.key]} {_gb(actor.bytes_per_gpu)}" for actor in fullest.actors)
        largest = max(fullest.actors, key=lambda actor: actor.bytes_per_gpu)
        raise NoRoom(
            f"{parts} need {_gb(fullest.num_bytes)} of a GPU, which has {_gb(fullest.limit)} to give ({USABLE:.0%} of "
            f"{_gb(fullest.gpu_bytes or 0.0)} that are free); expected {SMALLER[largest.key]}"
        )
    if is_exclusive and (refused := next((gpu for gpu in gpus if len(gpu.actors) > 1), None)):
        raise UserError(
            f"GPUs have compute mode Exclusive_Process, which lets one process in, but the layout puts "
            f"{refused.describe()} on one; expected mode Default (nvidia-smi -c DEFAULT, as root), or numbers for "
            "resources.train, resources.score and resources.index that share no GPU"
        )


def _check_host_memory(sizes: Sizes, index: IndexActors, nodes: Sequence[Node], is_refreshed: bool) -> None:
    """Raise NoRoom if the nodes' memory does not hold the versions of the index during a swap."""
    needed = _host_bytes(sizes, index, len(nodes)) / (1 if is_refreshed else VERSIONS)
    memory = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    if needed > memory:
        what = "two versions of the index take" if is_refreshed else "the index takes"
        raise NoRoom(
            f"{what} {_gb(needed)} of each node's memory, which has {_gb(memory)}; expected index.kind=pq or ivf_pq, "
            "fewer index.dims, more nodes, or GPUs that hold it"
        )


def _host_bytes(sizes: Sizes, index: IndexActors, num_nodes: int) -> float:
    """Return each node's bytes for the versions of a swap. Searchers of a node share exact vectors."""
    return VERSIONS * (sizes.vectors or 0.0) / min(num_nodes, index.num_shards)


def nodes_of(descriptions: Sequence[dict], driver: str) -> Iterator[Node]:
    """Yield the living nodes of `ray.nodes()`; `driver` is the id of the command's."""
    for node in descriptions:
        if node["Alive"]:
            resources, name = node["Resources"], node["NodeID"]
            cpus, gpus, memory = resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("memory")
            address = node["NodeManagerAddress"]
            yield Node(name, cpus, gpus, memory_bytes=memory, is_driver=name == driver, address=address)


def _notes_on(layout: Layout, nodes: Sequence[Node], sizes: Sizes) -> Iterator[str]:
    """Yield notes for the user: idle GPUs, unchecked memory, an index in host memory."""
    num_gpus = sum(int(node.gpus) for node in nodes)
    if idle := num_gpus - sum(gpu.count for gpu in layout.gpus):
        yield f"{idle} of {num_gpus} GPUs stay idle"
    keys = {actor.key for gpu in layout.gpus for actor in gpu.actors if actor.num_bytes is None}
    if any(gpu.gpu_bytes is None for gpu in layout.gpus):
        yield "the memory of the GPUs is not known and was not checked"
    elif keys:
        unknown = " and a ".join(NAMES[key] for key in NAMES if key in keys)
        yield f"the GPU memory of a {unknown} is not known and was not checked"
    if num_gpus and sizes.vectors and any(actor.key == SEARCHER and not actor.gpus for actor in layout.actors):
        needed = _host_bytes(sizes, layout.index, len(nodes))
        yield f"the index is searched in host memory: two versions take {_gb(needed)} of each node"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


# GPUs of each role ---------------------------------------------------------------------------------------------------


def gpus_by_role(
    config: Config, nodes: Sequence[Node], sizes: Sizes, roles: Collection[str]
) -> tuple[dict[str, range], int]:
    """Return the numbers of each role's GPUs (none: it is on processors), and the GPUs of one LM; resolve `auto`.

    Raises UserError for counts that fit none of the layouts.
    """
    num_gpus = sum(int(node.gpus) for node in nodes)
    takers = [role for role in ROLES if role in roles and _takes_gpus(config, role, nodes)]
    given = {role: int(value) for role in takers if (value := getattr(config.resources, role)) != "auto"}
    # Bytes that actors may take of the GPU with the least memory free.
    limit = USABLE * min((node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes), default=math.inf)
    replica = 1
    if "score" in takers:  # the configured GPUs of one LM, else the fewest that hold it
        replica = int(config.lm.gpus_per_replica or max(1, math.ceil((sizes.scoring or 0.0) / limit)))
    counts = dict.fromkeys(ROLES, 0) | given
    if num_gpus == 1:
        counts |= dict.fromkeys(takers, 1) | given
    else:
        if "train" in takers and "train" not in given:
            counts["train"] = _ranks(config, num_gpus, len(takers) > 1, sizes, limit)
        counts |= _score_and_index(takers, given, num_gpus - counts["train"], num_gpus, replica)
    _check(counts, takers, num_gpus, replica)
    train, is_shared = counts["train"], sum(counts.values()) > num_gpus
    firsts = {"train": 0, "index": train, "score": train if is_shared else train + counts["index"]}
    if num_gpus == 1:
        firsts = dict.fromkeys(ROLES, 0)
    return {role: range(firsts[role], firsts[role] + counts[role]) for role in ROLES}, replica


def _takes_gpus(config: Config, role: str, nodes: Sequence[Node]) -> bool:
    """Return whether a role has GPUs, by its keys and by the machine."""
    has_gpus = any(node.gpus for node in nodes)
    if role == "score":
        if config.lm.path and config.lm.gpus_per_replica and not has_gpus:
            raise UserError(f"lm.gpus_per_replica is {config.lm.gpus_per_replica:g}, but there is no GPU; remove it")
        return has_gpus and config.lm.path is not None and config.lm.gpus_per_replica != 0
    if role == "index":
        return has_gpus
    here = next(node for node in nodes if node.is_driver)
    if has_gpus and not here.gpus:
        raise UserError(
            f"the command runs on {here.where}, where rank 0 trains, and that has no GPU, but the cluster has "
            f"{sum(node.gpus for node in nodes):g}: start it on a node with a GPU"
        )
    return here.gpus > 0


def _score_and_index(
    takers: Collection[str], given: dict[str, int], left: int, num_gpus: int, replica: int
) -> dict[str, int]:
    """Return the GPUs of scoring and of the index, out of `left`: all for both, or the rest for the open one."""
    if "score" not in takers:
        return {"index": given.get("index", left)} if "index" in takers else {}
    if "index" not in takers:
        return {"score": given.get("score", left // replica * replica)}
    score, index = given.get("score"), given.get("index")
    if index is None and score is None and replica > 1:
        index = max(1, num_gpus // GPUS_PER_RANK)
    if index is None:
        index = (left if score is None else left - score) or left
    if score is None:
        score = left if index == left and replica == 1 else (left - index) // replica * replica
    return {"score": score, "index": index}


def _check(counts: dict[str, int], takers: Collection[str], num_gpus: int, replica: int) -> None:
    """Raise UserError if the numbers of GPUs fit none of the three layouts."""
    train, score, index = (counts[role] for role in ROLES)
    if "score" in takers and 1 <= score < replica:
        raise UserError(
            f"resources.score is {score}, but one LM takes {replica} GPUs "
            "(lm.gpus_per_replica); expected more, or a smaller lm.path"
        )
    is_together = score == index and replica == 1 and train + score <= num_gpus
    fits = train + score + index <= num_gpus or num_gpus == 1 or is_together
    if fits and all(1 <= counts[role] <= num_gpus for role in takers):
        return
    resolved = ", ".join(f"resources.{role}={max(0, counts[role])}" for role in takers)
    raise UserError(
        f"{resolved} do not fit the cluster's {num_gpus} GPUs; expected a sum of at most {num_gpus}, or the same "
        "number for score and index, which then share GPUs"
    )


def _ranks(config: Config, num_gpus: int, leaves_some: bool, sizes: Sizes, limit: float) -> int:
    """Return one rank in eight GPUs, fewer for parts of equal size, or more if a part does not fit a GPU's memory."""
    parts = config.train.batch_size // config.train.micro_batches
    dividing = [n for n in range(1, max(1, num_gpus - leaves_some) + 1) if parts % n == 0]
    ranks = max(n for n in dividing if n <= max(1, num_gpus // GPUS_PER_RANK))
    if sizes.training is None:
        return ranks
    training = sizes.training
    return next((n for n in dividing if n >= ranks and training(n) <= limit), ranks)
