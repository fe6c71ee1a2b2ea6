"""Decide which part of a cluster trains, scores and indexes: a configuration and nodes in, places and notes out.

The layout fills the keys that are left open. It knows what the roles take of a GPU's memory (`Sizes`): exact vectors
are searched on GPUs if two versions have room there, else in host memory. `replug plan` and a run both ask it.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from replug.cluster.gpu_shares import (
    EXACT_KINDS,
    ROLES,
    SHARED,
    Sizes,
    are_shared,
    gpus_by_role,
    gpus_of_replica,
    host_bytes,
    ray_share,
)
from replug.cluster.packing import (
    BUILDER,
    NAMES,
    SCORER,
    SEARCHER,
    TRAINER,
    USABLE,
    Actor,
    ActorGroup,
    Node,
    Packing,
    PlannedGPU,
)
from replug.config.choices import SwapMode
from replug.config.errors import UserError
from replug.config.schema import Config, IndexConfig, LMConfig

SMALLER = {
    TRAINER: "train.chunk_tokens=8192, train.gradient_checkpointing=true, a larger train.micro_batches, or more ranks "
    "(resources.train)",
    SEARCHER: "more index.num_shards, index.gpus_per_searcher=0 (host memory), or index.kind=ivf_pq",
    BUILDER: "a smaller index.tokens_per_batch, or more GPUs (resources.index)",
    SCORER: "a larger lm.gpus_per_replica, a smaller lm.tokens_per_batch, or fewer GPUs (resources.score)",
}
OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster started here


class NoRoom(UserError):
    """Raised for actors that find no place on the nodes."""


class OutOfMemory(NoRoom):
    """Raised for actors that a GPU's memory does not hold."""


@dataclass(frozen=True)
class Layout:
    """Who runs where. `config` has a number for every key that was left open."""

    config: Config
    gpus: tuple[PlannedGPU, ...]
    actors: tuple[Actor, ...]  # all, those without a place too
    num_waiting: int  # scorers that find no room yet, and join when a node does
    notes: tuple[str, ...]  # what a user may not expect
    is_shared: bool = False  # roles have more GPUs together than there are

    @property
    def trains_on_gpu(self) -> bool:
        return any(actor.key == TRAINER and actor.gpus for actor in self.actors)

    def on_node(self, name: str, known: str) -> "Layout":
        """Return the resource by which Ray names a node."""
        gpus = (replace(gpu, node=replace(gpu.node, name=known)) if gpu.node.name == name else gpu for gpu in self.gpus)
        return replace(self, gpus=tuple(gpus))

    @property
    def reserved(self) -> tuple[PlannedGPU, ...]:
        """GPUs that are held for their actors; scorers alone take what is left, also on nodes that join.

        Of GPUs that roles share all are held: Ray would put four scorers with a quarter each on one.
        """
        return tuple(gpu for gpu in self.gpus if any(self.is_shared or actor.key != SCORER for actor in gpu.actors))

    def describe(self) -> str:
        """One line on who does what."""
        kinds = {(actor.key, actor.gpus): 0 for actor in self.actors}
        for actor in self.actors:
            kinds[actor.key, actor.gpus] += 1
        return ", ".join(f"{key} {n}" + (f" x {gpus:g} GPU" if gpus else "") for (key, gpus), n in kinds.items())


@dataclass(frozen=True, slots=True)
class IndexActors:
    """Numbers of the section `index`."""

    num_shards: int
    num_builders: int
    gpus_per_builder: float
    gpus_per_searcher: float


UNKNOWN = Sizes()


def lay_out(config: Config, nodes: Sequence[Node], sizes: Sizes = UNKNOWN, roles: Collection[str] = ROLES) -> Layout:
    """Return places for the actors of those roles. Raises UserError, with numbers, where they find no room.

    One scorer is enough to begin with. Exact vectors are searched on GPUs where those have room, else in host memory.
    """
    may_move = config.index.gpus_per_searcher is None
    try:
        return _lay_out(config, nodes, sizes, roles, True)
    except OutOfMemory:
        if not may_move:
            raise
    return _lay_out(config, nodes, sizes, roles, False)


def num_ranks(config: Config) -> int:
    """Return the trainer ranks of a configuration that is laid out."""
    return max(1, int(config.resources.train))


def index_actors(index: IndexConfig) -> IndexActors:
    """Return the numbers of a section; what is left open is one of each, on processors."""
    return IndexActors(
        index.num_shards or 1, index.num_builders or 1, index.gpus_per_builder or 0.0, index.gpus_per_searcher or 0.0
    )


def scorers(lm: LMConfig) -> tuple[int, float]:
    """Return replicas and GPUs of each; what is left open is one, on processors."""
    return lm.num_replicas or 1, lm.gpus_per_replica or 0.0


def _lay_out(
    config: Config,
    nodes: Sequence[Node],
    sizes: Sizes,
    roles: Collection[str],
    may_search_on_gpu: bool,
) -> Layout:
    """Place trainers first, since rank 0's must be here; then the index; scorers take what is left."""
    gpus = gpus_by_role(config, nodes, sizes, roles, may_search_on_gpu)
    shared, groups, waiting = are_shared(gpus, nodes), list[ActorGroup](), 0
    if "train" in roles:
        number = gpus["train"] if "train" in gpus else _processes(config, "train", None)
        config = replace(config, resources=replace(config.resources, train=number))
        each, ranks = SHARED if shared else min(1.0, gpus.get("train", 0.0)), num_ranks(config)
        num_bytes = None if sizes.training is None else sizes.training(ranks)
        # Rank 0 is the process that was started; on a processor it takes no place.
        ranked = [Actor(TRAINER, rank, each, num_bytes) for rank in range(0 if each else 1, ranks)]
        groups += [ActorGroup((actor,), on_driver=actor.number == 0) for actor in ranked]
    if "index" in roles:
        config = replace(config, index=_index(config, gpus.get("index", 0.0), may_search_on_gpu, shared, len(nodes)))
        groups += _index_groups(config.index, sizes)
    packing = Packing(nodes, spread=shared)
    for group in groups:
        _require_place(packing, group, groups)
    if config.lm.path and "score" in roles:
        lm, scoring, waiting = _scorers(config, gpus, packing, groups, sizes)
        config, groups = replace(config, lm=lm), groups + scoring
    actors, planned = tuple(actor for group in groups for actor in group.actors), packing.planned()
    _require_shareable(planned)
    return Layout(config, planned, actors, waiting, tuple(_notes_on(config, nodes, sizes, planned, actors)), shared)


def _processes(config: Config, role: str, explicit: int | None) -> int:
    """Return the actors of a role that has no GPUs."""
    value = getattr(config.resources, role)
    if value != "auto" and value < 1:
        raise UserError(
            f"resources.{role} is {value}, a share of a GPU, but the cluster has no GPU for it; expected a number of "
            "processes, or auto"
        )
    return explicit or (1 if value == "auto" else int(value))


def _index(config: Config, gpus: float, may_search_on_gpu: bool, shared: bool, num_nodes: int) -> IndexConfig:
    """Return the section with a number for each key. Builders and searchers share GPUs half and half.

    Lossy kinds, which are small, are searched on processors. With blue_green over several GPUs of their own, half of
    these search while the others build, and they change places at every swap.
    """
    index, exact = config.index, config.index.kind in EXACT_KINDS
    if not gpus:
        builders = _processes(config, "index", index.num_builders)
        return replace(index, num_builders=builders, **_filled(index, 1, 0.0, 0.0))
    count, whole = max(1, math.floor(gpus)), 2 * SHARED if shared else min(1.0, gpus)
    on_gpu = index.gpus_per_searcher != 0 if index.gpus_per_searcher is not None else may_search_on_gpu and exact
    if not on_gpu:
        builders, shards = index.num_builders or count, num_nodes if exact else 1
        per_builder = ray_share(whole / math.ceil(builders / count))
        return replace(index, num_builders=builders, **_filled(index, shards, per_builder, 0.0))
    apart = index.swap is SwapMode.blue_green and count > 1 and not shared
    count, half = (count // 2, whole) if apart else (count, whole / 2)
    # The files of a lossy kind have as many parts as there are shards: these must not follow from the GPUs at hand.
    builders, shards = index.num_builders or count, index.num_shards or (count if exact else 1)
    per_builder, per_searcher = (ray_share(half / math.ceil(number / count)) for number in (builders, shards))
    return replace(index, num_builders=builders, **_filled(index, shards, per_builder, per_searcher))


def _filled(index: IndexConfig, shards: int, per_builder: float, per_searcher: float) -> dict[str, Any]:
    """Return numbers for the keys that are left open."""
    return {
        "num_shards": index.num_shards or shards,
        "gpus_per_builder": per_builder if index.gpus_per_builder is None else index.gpus_per_builder,
        "gpus_per_searcher": per_searcher if index.gpus_per_searcher is None else index.gpus_per_searcher,
    }


def _index_groups(index: IndexConfig, sizes: Sizes) -> list[ActorGroup]:
    """Put a builder and a searcher on each GPU together, if both find room there."""
    asked = index_actors(index)
    blue_green = index.swap is SwapMode.blue_green
    apart = asked.gpus_per_builder + asked.gpus_per_searcher > 1 or not (
        asked.gpus_per_builder and asked.gpus_per_searcher
    )
    if blue_green and apart and asked.gpus_per_searcher and asked.num_shards != asked.num_builders:
        raise UserError(
            f"index.num_builders is {asked.num_builders}; expected index.num_shards={asked.num_shards}, since with "
            "index.swap=blue_green builders and searchers change places"
        )
    version = None if sizes.vectors is None or not asked.gpus_per_searcher else sizes.vectors / asked.num_shards
    if version is None or not blue_green:
        builds, searches = sizes.embedding, None if version is None else 2 * version + sizes.search
    else:
        version += sizes.search
        builds = max(sizes.embedding or 0.0, version)  # the next version's searcher takes the builder's place
        searches = builds if apart else version
    builders = [Actor(BUILDER, n, asked.gpus_per_builder, builds) for n in range(asked.num_builders)]
    shards = asked.num_shards * (2 if blue_green and not asked.gpus_per_searcher else 1)
    searchers = [Actor(SEARCHER, n, asked.gpus_per_searcher, searches) for n in range(shards)]
    if apart:
        return [ActorGroup((actor,)) for actor in [*searchers, *builders]]
    return [ActorGroup(tuple(filter(None, pair))) for pair in zip_longest(searchers, builders)]


def _scorers(
    config: Config, gpus: dict[str, float], packing: Packing, others: Sequence[ActorGroup], sizes: Sizes
) -> tuple[LMConfig, list[ActorGroup], int]:
    """Return the section with a number for each key, its groups, and how many of these wait for room.

    On shared GPUs none waits: it would find three others of its kind on the GPU of a node that joins.
    """
    lm, share, shared = config.lm, gpus.get("score", 0.0), packing.spread
    if not share:
        count = _processes(config, "score", lm.num_replicas)
        each = lm.gpus_per_replica or 0.0
    elif shared:
        each, count = SHARED if lm.gpus_per_replica is None else lm.gpus_per_replica, lm.num_replicas or int(share)
    else:
        each = gpus_of_replica(lm, share, packing.nodes, sizes)
        if share < each:
            raise UserError(f"resources.score is {share:g}, less than the {each:g} GPUs of lm.gpus_per_replica")
        count = lm.num_replicas or (0 if math.isinf(share) else int(share / each + 1e-4))

    def group(number: int) -> ActorGroup:
        may_wait = number > 0 and not shared
        return ActorGroup((Actor(SCORER, number, each, sizes.scoring if each else None),), may_wait=may_wait)

    groups = [group(number) for number in range(count or 1)]
    required = [one for one in groups if not one.may_wait]
    for one in required:
        _require_place(packing, one, [*others, *groups])
    placed = len(required) + sum(packing.place(one) for one in groups[len(required) :])
    while not count and packing.place(group(placed)):
        groups.append(group(placed))
        placed += 1
    return replace(lm, num_replicas=len(groups), gpus_per_replica=each), groups, len(groups) - placed


def _require_place(packing: Packing, group: ActorGroup, groups: Sequence[ActorGroup]) -> None:
    if not packing.place(group):
        if packing.lacks_memory_only(group):
            raise OutOfMemory(_describe_memory(packing, group))
        raise NoRoom(_describe_shortage(packing, group, groups))


def _require_shareable(gpus: Sequence[PlannedGPU]) -> None:
    """Raise UserError for several processes on a GPU whose compute mode lets one in."""
    refused = next((gpu for gpu in gpus if gpu.node.is_exclusive and len(gpu.actors) > 1), None)
    if refused is not None:
        raise UserError(
            f"GPUs of {refused.node.where} have compute mode Exclusive_Process, which lets one process in, but the "
            f"layout puts {refused.describe()} on one; expected mode Default (nvidia-smi -c DEFAULT, as root), CUDA "
            "MPS (nvidia-cuda-mps-control -d before Ray starts), or whole numbers in "
            "resources that share no GPU, with index.gpus_per_searcher=0"
        )


def nodes_of(descriptions: Sequence[dict], driver: str) -> Iterator[Node]:
    """Yield the living nodes of `ray.nodes()`; `driver` is the id of the command's."""
    for node in descriptions:
        if node["Alive"]:
            resources, name = node["Resources"], node["NodeID"]
            cpus, gpus, memory = resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("memory")
            address = node["NodeManagerAddress"]
            yield Node(name, cpus, gpus, memory_bytes=memory, is_driver=name == driver, address=address)


# What a user is told: what finds no room, which keys change that, what may surprise.


def _describe_memory(packing: Packing, group: ActorGroup) -> str:
    parts = " + ".join(f"{NAMES[actor.key]} {_gb(actor.num_bytes or 0.0)}" for actor in group.actors)
    each = f" on each of {group.gpus:g} GPUs" if group.gpus > 1 else ""
    open_to_it = [gpu for gpu in packing.planned() if not (packing.spread and gpu.has(group.key))]
    most = max(open_to_it, key=lambda gpu: gpu.node.gpu_limit - gpu.num_bytes)
    others = f" and {_gb(most.num_bytes)} are taken" if most.actors else ""
    return (
        f"{group.key}: {parts} need {_gb(group.num_bytes)}{each}, but a GPU has {_gb(most.node.gpu_limit)} to give "
        f"({USABLE:.0%} of {_gb(most.node.gpu_bytes or 0.0)} that are free){others}; expected {SMALLER[group.key]}"
    )


def _describe_shortage(packing: Packing, group: ActorGroup, groups: Sequence[ActorGroup]) -> str:
    nodes, wanted = packing.nodes, [one for one in groups if not one.may_wait]
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    all_gpus = sum(one.gpus for one in wanted)
    actors = [actor for one in wanted for actor in one.actors]
    alike = [one for one in wanted if one.key == group.key]
    keys = " + ".join(dict.fromkeys(actor.key for actor in actors))
    where = " on the node of the command" if group.on_driver else ""
    each = f", each {group.gpus:g} GPU" if group.gpus else ""
    has = f"{gpus:g} GPUs" if math.isinf(cpus) else f"{cpus:g} CPUs and {gpus:g} GPUs"
    need = f"{all_gpus:g} GPUs" if math.isinf(cpus) else f"{len(actors)} CPUs and {all_gpus:g} GPUs"
    return (
        f"the cluster has {has} on {len(nodes)} nodes, but the actors need at least {need} ({keys}): "
        f"{alike.index(group)} of {len(alike)} actors of {group.key}{each} find room{where}; ask for fewer, "
        "or add nodes"
    )


def _notes_on(
    config: Config,
    nodes: Sequence[Node],
    sizes: Sizes,
    gpus: Sequence[PlannedGPU],
    actors: Sequence[Actor],
) -> Iterator[str]:
    idle = [gpu for gpu in gpus if not gpu.actors]
    if idle:
        yield f"{len(idle)} of {len(gpus)} GPUs stay idle ({', '.join(sorted({gpu.node.where for gpu in idle}))})"
    keys = {actor.key for actor in actors if actor.gpus}
    unknown = [NAMES[key] for key in NAMES if any(a.key == key and a.gpus and a.num_bytes is None for a in actors)]
    if keys and any(gpu.node.gpu_bytes is None for gpu in gpus if gpu.actors):
        yield "the memory of the GPUs is not known, so whether it is enough was not checked"
    elif unknown:
        yield f"what a {' and a '.join(unknown)} takes of GPU memory is not known and was not checked"
    if any(gpu.has(TRAINER) and len(gpu.actors) > 1 for gpu in gpus) and num_ranks(config) > 1:
        yield (
            "several trainer ranks are on GPUs that other processes use, and wait for each other's time slices: "
            "resources.train=1, or GPUs of their own, would be faster"
        )
    has_searchers = any(actor.key == SEARCHER for actor in actors)
    if not (has_searchers and gpus) or sizes.vectors is None or config.index.gpus_per_searcher:
        return
    needed = host_bytes(config.index, sizes, len(nodes))
    yield f"the index is searched in host memory: two versions take {_gb(needed)} of each node"
    host = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    if needed > host:
        yield f"a node's memory has {_gb(host)}, less than two versions: searches at a swap wait for the disk"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
