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
from replug.config.schema import Config

# Actors are known by the key that sets their number.
TRAINER, SEARCHER, BUILDER, SCORER = "resources.train", "index.num_shards", "resources.index", "resources.score"
NAMES = {TRAINER: "trainer rank", SEARCHER: "searcher", BUILDER: "builder", SCORER: "scorer"}

USABLE = 0.92  # of a device's memory: the rest is the driver's, the allocator's gaps, one process's context
CONTEXT_BYTES = 7.2e8  # of each further process on a GPU: CUDA's context and cuBLAS; 0.62 to 0.72 GB on an H200

ROLES = ("train", "score", "index")
GPUS_PER_RANK = 8  # with `auto`, one of them trains
SMALLER = {
    TRAINER: "train.chunk_tokens=8192, or more train.micro_batches or resources.train",
    SEARCHER: "more index.num_shards",
    BUILDER: "resources.score and resources.index that share no GPU",
    SCORER: "a smaller lm.path or lm.tokens_per_batch",
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
        held, keys = [one.num_bytes for one in self.actors], {one.key for one in self.actors}
        if self.gpu_bytes is None or None in held or len(held) < 2 or keys <= {SEARCHER, BUILDER}:
            return None
        free = self.gpu_bytes - CONTEXT_BYTES * (len(held) + 1)  # less all contexts, and one for the driver
        planned = sum(one.bytes_per_gpu for one in self.actors)
        return actor.bytes_per_gpu * max(1.0, free / planned)

    def describe(self) -> str:
        """Name the actors, as `builder 0 and searcher 0`."""
        return " and ".join(f"{NAMES[actor.key]} {actor.number}" for actor in self.actors)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that actors hold on their GPUs (`planning.memory`). None means not known; nothing is checked then."""

    vectors: float | None = None  # of one index version as it is searched, all shards together
    search: float = 0.0  # a searcher, beside its vectors
    embedding: float | None = None  # a builder: its encoder and one pass
    scoring: float | None = None  # an LM and one pass, over all its GPUs
    training: Callable[[int], float] | None = None  # of a rank, by the number of ranks


UNKNOWN = Sizes()


@dataclass(frozen=True, slots=True)
class IndexActors:
    """Numbers of the index's actors, and whether they have GPUs."""

    num_shards: int = 1
    num_builders: int = 1
    build_on_gpu: bool = False
    search_on_gpu: bool = False


@dataclass(frozen=True)
class Layout:
    """Places of all actors. `config` has a number for each of `resources`."""

    config: Config
    index: IndexActors
    gpus: tuple[PlannedGPU, ...]  # with actors
    actors: tuple[Actor, ...]  # on GPUs and on processors

    @property
    def trains_on_gpu(self) -> bool:
        return any(actor.key == TRAINER and actor.gpus for actor in self.actors)

    def describe(self) -> str:
        """Return one line with the number of actors and GPUs of each role."""
        kinds = dict.fromkeys((actor.key, actor.gpus) for actor in self.actors)
        counts = {kind: sum((actor.key, actor.gpus) == kind for actor in self.actors) for kind in kinds}
        return ", ".join(f"{key} {n}" + (f" x {gpus:g} GPU" if gpus else "") for (key, gpus), n in counts.items())


def lay_out(config: Config, nodes: Sequence[Node], sizes: Sizes = UNKNOWN, roles: Collection[str] = ROLES) -> Layout:
    """Return places for the actors of `roles`. Raises UserError, with numbers, where they find no room.

    Exact vectors are searched on GPUs if two versions fit beside the other actors, else in host memory, like lossy
    kinds.
    """
    numbers, each = gpus_by_role(config, nodes, sizes, roles)
    counts = {role: len(numbers[role]) or _processes(config, role) for role in roles}
    config = replace(config, resources=replace(config.resources, **counts))
    for search_on_gpu in (True, False) if numbers["index"] and config.index.kind in EXACT_KINDS else (False,):
        index = _index_actors(config, numbers["index"], nodes, search_on_gpu)
        gpus, elsewhere = _placed(config, numbers, each, nodes, sizes, roles, index)
        if all(gpu.num_bytes <= gpu.limit for gpu in gpus):
            break
    actors = [*(actor for gpu in gpus for actor in gpu.actors), *elsewhere]
    _check_gpus(gpus)
    if (cpus := sum(node.cpus for node in nodes)) < len(actors):
        keys = " + ".join(dict.fromkeys(actor.key for actor in actors))
        raise UserError(
            f"the cluster has {cpus:g} CPUs on {len(nodes)} nodes, but {keys} need {len(actors)}: ask for "
            "fewer, or add nodes (SLURM: --nodes, --cpus-per-task)"
        )
    if "index" in roles and not search_on_gpu:
        _check_host_memory(sizes, index, nodes, "train" in roles)
    return Layout(config, index, gpus, tuple(actors))


def num_ranks(config: Config) -> int:
    """Return the trainer ranks of a configuration that is laid out."""
    return max(1, int(config.resources.train))


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
    each: int,
    nodes: Sequence[Node],
    sizes: Sizes,
    roles: Collection[str],
    index: IndexActors,
) -> tuple[tuple[PlannedGPU, ...], list[Actor]]:
    """Return the GPUs with their actors, and the actors elsewhere. Rank 0's GPU, which must be here, comes first.

    `each` is the GPUs of one LM.
    """
    on_gpu: dict[int, list[Actor]] = {}
    elsewhere: list[Actor] = []

    def put(key: str, actors: range, gpus: range, num_bytes: float | None, each: int = 1) -> None:
        """Put one actor after the other on the GPUs of a role, or on processors."""
        for number in actors:
            if gpus:
                gpu = gpus[number * each % len(gpus)]
                on_gpu.setdefault(gpu, []).append(Actor(key, number, float(each), num_bytes))
            else:
                elsewhere.append(Actor(key, number))

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
        count = _processes(config, "score")
        if gpus := numbers["score"]:  # an LM's GPUs are of one node
            count = max(1, min(len(gpus) // each, sum(int(node.gpus) // each for node in nodes)))
        put(SCORER, range(count), gpus, sizes.scoring, each)
    free = min((node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes is not None), default=None)
    for number, actors in on_gpu.items():
        if len(actors) > 1:  # shares of a GPU in ten-thousandths, in which Ray counts
            on_gpu[number] = [replace(actor, gpus=math.floor(1e4 / len(actors)) / 1e4) for actor in actors]
    return tuple(PlannedGPU(tuple(on_gpu[number]), free) for number in sorted(on_gpu)), elsewhere


def _check_gpus(gpus: Sequence[PlannedGPU]) -> None:
    """Raise UserError if a GPU's memory does not hold its actors."""
    fullest = max(gpus, key=lambda gpu: gpu.num_bytes / gpu.limit, default=None)
    if fullest is not None and fullest.num_bytes > fullest.limit:
        parts = " + ".join(f"{NAMES[actor.key]} {_gb(actor.bytes_per_gpu)}" for actor in fullest.actors)
        largest = max(fullest.actors, key=lambda actor: actor.bytes_per_gpu)
        raise UserError(
            f"{parts} need {_gb(fullest.num_bytes)} of a GPU, which has {_gb(fullest.limit)} to give ({USABLE:.0%} of "
            f"{_gb(fullest.gpu_bytes or 0.0)} that are free); expected {SMALLER[largest.key]}"
        )


def _check_host_memory(sizes: Sizes, index: IndexActors, nodes: Sequence[Node], is_refreshed: bool) -> None:
    """Raise UserError if the nodes' memory does not hold the versions of the index during a swap."""
    versions = VERSIONS if is_refreshed else 1
    needed = versions * (sizes.vectors or 0.0) / min(len(nodes), index.num_shards)  # searchers of a node share vectors
    memory = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    if needed > memory:
        what = "two versions of the index take" if is_refreshed else "the index takes"
        raise UserError(
            f"{what} {_gb(needed)} of each node's memory, which has {_gb(memory)}; expected index.kind=pq or ivf_pq, "
            "fewer index.dims, more nodes, or GPUs that hold it"
        )


def nodes_of(descriptions: Sequence[dict], driver: str) -> Iterator[Node]:
    """Yield the living nodes of `ray.nodes()`; `driver` is the id of the command's."""
    for node in descriptions:
        if node["Alive"]:
            resources, name = node["Resources"], node["NodeID"]
            cpus, gpus, memory = resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("memory")
            address = node["NodeManagerAddress"]
            yield Node(name, cpus, gpus, memory_bytes=memory, is_driver=name == driver, address=address)


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
    if "score" in takers:  # the fewest GPUs that hold an LM
        replica = max(1, math.ceil((sizes.scoring or 0.0) / limit))
    counts = dict.fromkeys(ROLES, 0) | given
    if num_gpus == 1:
        counts |= dict.fromkeys(takers, 1) | given
    else:
        if "train" in takers and "train" not in given:
            parts = config.train.batch_size // config.train.micro_batches
            counts["train"] = max(n for n in range(1, max(1, num_gpus // GPUS_PER_RANK) + 1) if parts % n == 0)
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
    if role != "train":
        return has_gpus and (role == "index" or config.lm.path is not None)
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
            f"resources.score is {score}, but one LM takes {replica} GPUs; expected more, or a smaller lm.path"
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
