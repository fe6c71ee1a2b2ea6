"""Which part of a cluster trains, scores and indexes. Pure: a configuration and nodes in, places and sentences out.

`resources` is the short way to say it; what it leaves open the layout decides, and a key that is set stays as it is.
The layout knows what the roles take of a GPU's memory (`Sizes`): exact vectors are searched on GPUs where two
versions have room there, else in host memory. `replug plan` and a run ask this same module, so a plan is what runs.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Generic, TypeVar

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
from replug.configs.errors import UserError
from replug.configs.schema import Accelerator, Config, IndexConfig, LMConfig, ScoreConfig, SwapMode

ROLES = ("train", "score", "index")
WEIGHTS = {"train": 1, "score": 2, "index": 1}  # by which they share fewer GPUs than there are roles
EXACT_KINDS = ("flat_fp16",)  # whose vectors any number of searchers may share

OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster started here

SMALLER = {
    TRAINER: "train.gradient_checkpointing=true, a larger train.micro_batches, or more ranks (resources.train)",
    SEARCHER: "more index.num_shards, index.gpus_per_searcher=0 (host memory), or index.kind=ivf_pq",
    BUILDER: "a smaller index.tokens_per_batch, or more GPUs (resources.index)",
    SCORER: "a larger lm.gpus_per_replica, or a smaller lm.tokens_per_batch",
}
AnyConfig = TypeVar("AnyConfig", Config, ScoreConfig)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that actors hold on their GPUs (`planning.sizes`); None where they are not known, and then not checked."""

    vectors: float | None = None  # of one index version as it is searched, all shards together
    embedding: float | None = None  # a builder: its encoder and one pass
    scoring: float | None = None  # an LM and one pass, over all its GPUs
    trained: float | None = None  # weights, gradients and moments of a rank
    batch: float | None = None  # activations of a whole batch, which ranks share


@dataclass(frozen=True)
class Layout(Generic[AnyConfig]):
    """Who runs where. `config` has a number for every key that was left open."""

    config: AnyConfig
    gpus: tuple[PlannedGPU, ...]
    actors: tuple[Actor, ...]  # all, those without a place too
    num_waiting: int  # scorers that find no room yet, and join when a node does
    notes: tuple[str, ...]  # what a user may not expect

    @property
    def trains_on_gpu(self) -> bool:
        return any(actor.key == TRAINER and actor.gpus for actor in self.actors)

    def on_node(self, name: str, known: str) -> "Layout[AnyConfig]":
        """With the name that Ray gave to a node."""
        gpus = (replace(gpu, node=replace(gpu.node, name=known)) if gpu.node.name == name else gpu for gpu in self.gpus)
        return replace(self, gpus=tuple(gpus))

    @property
    def reserved(self) -> tuple[PlannedGPU, ...]:
        """GPUs that are held for their actors; scorers alone take what is left, also on nodes that join."""
        return tuple(gpu for gpu in self.gpus if any(actor.key != SCORER for actor in gpu.actors))

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


class NoRoom(UserError):
    """Actors that find no place on the nodes."""


class OutOfMemory(NoRoom):
    """Actors that their GPU's memory does not hold."""


def lay_out(
    config: AnyConfig, nodes: Sequence[Node], sizes: Sizes = UNKNOWN, roles: Collection[str] = ROLES
) -> Layout[AnyConfig]:
    """Places for the actors of those roles. Raises UserError, with numbers, where they find no room.

    Of the scorers one is enough to begin with.
    """
    try:
        return _lay_out(config, nodes, sizes, roles, may_search_on_gpu=True)
    except OutOfMemory:
        if isinstance(config, ScoreConfig) or config.index.gpus_per_searcher is not None:
            raise
        return _lay_out(config, nodes, sizes, roles, may_search_on_gpu=False)


def num_ranks(config: Config) -> int:
    """Trainer ranks of a configuration that is laid out."""
    return max(1, int(config.resources.train))


def index_actors(index: IndexConfig) -> IndexActors:
    """What nobody has said is one of each, on processors."""
    return IndexActors(
        index.num_shards or 1, index.num_builders or 1, index.gpus_per_builder or 0.0, index.gpus_per_searcher or 0.0
    )


def scorers(lm: LMConfig) -> tuple[int, float]:
    """Replicas, and GPUs of each; what nobody has said is one, on processors."""
    return lm.num_replicas or 1, lm.gpus_per_replica or 0.0


def trains_on_gpu(config: Config | ScoreConfig, has_gpu: bool) -> bool:
    """Whether the trainer runs on a GPU. Raises UserError where it must and there is none."""
    if isinstance(config, ScoreConfig) or config.train.accelerator is Accelerator.cpu:
        return False
    if config.train.accelerator is Accelerator.gpu and not has_gpu:
        raise UserError("train.accelerator is gpu, but torch finds no GPU on this machine; expected auto or cpu")
    return has_gpu


def _lay_out(
    config: AnyConfig, nodes: Sequence[Node], sizes: Sizes, roles: Collection[str], may_search_on_gpu: bool
) -> Layout[AnyConfig]:
    """Trainers take their places first, since rank 0's must be here; then the index; scorers take what is left."""
    packing = Packing(nodes)
    groups: list[ActorGroup] = []
    laid: Any = config  # a type variable cannot be narrowed
    gpus = _gpus_by_role(config, nodes, sizes, roles, may_search_on_gpu)
    if isinstance(config, Config):
        laid, groups = _with_ranks_and_index(config, gpus, nodes, sizes, roles, may_search_on_gpu)
    for group in groups:
        _require_place(packing, group, groups)
    waiting = 0
    if config.lm.path and "score" in roles:
        lm, scoring, waiting = _scorers(config, gpus, packing, groups, sizes)
        laid, groups = replace(laid, lm=lm), groups + scoring
    actors, planned = tuple(actor for group in groups for actor in group.actors), packing.planned()
    return Layout(laid, planned, actors, waiting, tuple(_notes(laid, nodes, sizes, planned, actors)))


def _with_ranks_and_index(
    config: Config,
    gpus: dict[str, float],
    nodes: Sequence[Node],
    sizes: Sizes,
    roles: Collection[str],
    may_search_on_gpu: bool,
) -> tuple[Any, list[ActorGroup]]:
    """The configuration with their numbers, and their groups."""
    groups: list[ActorGroup] = []
    if "train" in roles:
        config = replace(config, resources=_trainer(config, gpus.get("train"), nodes))
        groups += _rank_groups(config, "train" in gpus, sizes)
    if "index" in roles:
        config = replace(config, index=_index(config, gpus.get("index", 0.0), may_search_on_gpu, len(nodes)))
        groups += _index_groups(config.index, sizes)
    return config, groups


def _gpus_by_role(
    config: Config | ScoreConfig, nodes: Sequence[Node], sizes: Sizes, roles: Collection[str], may_search_on_gpu: bool
) -> dict[str, float]:
    """GPUs of the roles that have any, `auto` resolved; of `score` infinity where it takes all that are left."""
    num_gpus = int(sum(node.gpus for node in nodes))
    if isinstance(config, ScoreConfig):
        return {"score": math.inf} if num_gpus and config.lm.gpus_per_replica != 0 else {}
    takers = [role for role in ROLES if role in roles and _takes_gpus(config, role, nodes)]
    asked = {role: getattr(config.resources, role) for role in takers}
    given = {role: float(value) for role, value in asked.items() if value != "auto"}
    if "score" in takers and "score" not in given:
        given.update(_of_a_large_lm(config.lm, num_gpus - sum(given.values()), len(takers) - len(given), nodes, sizes))
    open_roles, left = [role for role in takers if role not in given], num_gpus - sum(given.values())
    if open_roles and left <= 0:
        taken = " + ".join(f"resources.{role}={value:g}" for role, value in given.items())
        raise UserError(f"{taken} leaves no GPU of {num_gpus} for resources.{open_roles[0]}=auto; ask for fewer")
    index = _gpus_of_vectors(config, nodes, sizes, left - len(open_roles) + 1) if may_search_on_gpu else 1
    found = {**given, **_automatic(left, open_roles, index)}
    return {**found, "train": _dividing(config, found["train"])} if "train" in open_roles else found


def _of_a_large_lm(lm: LMConfig, left: float, open_roles: int, nodes: Sequence[Node], sizes: Sizes) -> dict[str, float]:
    """GPUs of one replica, where these leave the other roles less than a GPU each."""
    each = lm.gpus_per_replica or _gpus_of_replica(lm, math.inf, nodes, sizes)
    is_told = lm.gpus_per_replica is not None or each > 1
    return {"score": each} if is_told and left - each < open_roles - 1 else {}


def _takes_gpus(config: Config, role: str, nodes: Sequence[Node]) -> bool:
    """Whether a role has GPUs, by its keys and by what is there."""
    has_gpus = any(node.gpus for node in nodes)
    if role == "score":
        return has_gpus and config.lm.path is not None and config.lm.gpus_per_replica != 0
    if role == "index":
        return has_gpus and not config.index.gpus_per_builder == config.index.gpus_per_searcher == 0
    here = next(node for node in nodes if node.is_driver)
    if has_gpus and not here.gpus and config.train.accelerator is not Accelerator.cpu:
        raise UserError(
            f"the command runs on {here.where}, where rank 0 trains, and that has no GPU, but the cluster has "
            f"{sum(node.gpus for node in nodes):g}: start it on a node with a GPU, or set train.accelerator=cpu"
        )
    return trains_on_gpu(config, here.gpus > 0)


def _automatic(left: float, roles: Sequence[str], index_gpus: int) -> dict[str, float]:
    """The LM has by far the most to do: of eight GPUs six score (a paper-size run's hours)."""
    if not roles:
        return {}
    if left < len(roles):
        total = sum(WEIGHTS[role] for role in roles)
        return {role: min(1.0, _share(left * WEIGHTS[role] / total)) for role in roles}
    many = max(1, int(left // 8))
    found: dict[str, float] = {"train": many, "index": max(many, index_gpus), "score": math.inf}
    if "score" not in roles:
        found["index" if "index" in roles else "train"] = int(left) - (many if len(roles) > 1 else 0)
    return {role: found[role] for role in roles}


def _gpus_of_vectors(config: Config, nodes: Sequence[Node], sizes: Sizes, most: float) -> int:
    """GPUs that hold two versions, where those are a quarter of all or host memory is too small; else 1."""
    index, limit = config.index, min(node.gpu_limit for node in nodes)
    if sizes.vectors is None or math.isinf(limit) or index.kind not in EXACT_KINDS or index.gpus_per_searcher == 0:
        return 1
    if index.swap is SwapMode.blue_green:
        wanted = 2 * math.ceil(sizes.vectors / limit)
    else:
        wanted = math.ceil(2 * sizes.vectors / max(1.0, limit - (sizes.embedding or 0.0)))
    host = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    is_worth_it = wanted <= max(1, sum(node.gpus for node in nodes) // 4) or host_bytes(index, sizes, len(nodes)) > host
    return wanted if wanted <= most and is_worth_it else 1


def host_bytes(index: IndexConfig, sizes: Sizes, num_nodes: int) -> float:
    """Of each node's memory, for both versions of vectors that no GPU holds: searchers of one node share them."""
    return 2 * (sizes.vectors or 0.0) / min(num_nodes, index.num_shards or num_nodes)


def _dividing(config: Config, ranks: float) -> float:
    """So many ranks, or fewer, that all have parts of one size."""
    parts = config.train.batch_size // config.train.micro_batches
    return next((n for n in range(int(ranks), 1, -1) if parts % n == 0), min(ranks, 1))


def _trainer(config: Config, gpus: float | None, nodes: Sequence[Node]) -> Any:
    """`resources` with a number of ranks; without GPUs, of processes."""
    value = config.resources.train
    if value != "auto" and float(value) < 1 and not any(node.gpus for node in nodes):
        raise UserError(_share_without_gpu("train", value))
    return replace(config.resources, train=gpus if gpus is not None else 1 if value == "auto" else value)


def _share_without_gpu(role: str, value: object) -> str:
    return (
        f"resources.{role} is {value}, a share of a GPU, but the cluster has no GPU for it; expected a number of "
        "processes, or auto"
    )


def _processes(config: Config, role: str, explicit: int | None) -> int:
    """Actors of a role that has no GPUs."""
    value = getattr(config.resources, role)
    if value != "auto" and value < 1:
        raise UserError(_share_without_gpu(role, value))
    return explicit or (1 if value == "auto" else int(value))


def _index(config: Config, gpus: float, may_search_on_gpu: bool, num_nodes: int) -> IndexConfig:
    """The section with a number for each key. Builders and searchers share GPUs half and half.

    Lossy kinds, which are small, are searched on processors. With blue_green over several GPUs, half of these search
    while the others build, and they change places at every swap.
    """
    index, exact = config.index, config.index.kind in EXACT_KINDS
    if not gpus:
        builders = _processes(config, "index", index.num_builders)
        return replace(index, num_builders=builders, **_filled(index, 1, 0.0, 0.0))
    count, whole = max(1, math.floor(gpus)), min(1.0, gpus)
    on_gpu = index.gpus_per_searcher != 0 if index.gpus_per_searcher is not None else may_search_on_gpu and exact
    if not on_gpu:
        builders, shards = index.num_builders or count, num_nodes if exact else 1
        per_builder = _share(whole / math.ceil(builders / count))
        return replace(index, num_builders=builders, **_filled(index, shards, per_builder, 0.0))
    apart = index.swap is SwapMode.blue_green and count > 1
    count, half = (count // 2, whole) if apart else (count, whole / 2)
    # The files of a lossy kind have as many parts as there are shards: these must not follow from the GPUs at hand.
    builders, shards = index.num_builders or count, index.num_shards or (count if exact else 1)
    per_builder, per_searcher = (_share(half / math.ceil(number / count)) for number in (builders, shards))
    return replace(index, num_builders=builders, **_filled(index, shards, per_builder, per_searcher))


def _filled(index: IndexConfig, shards: int, per_builder: float, per_searcher: float) -> dict[str, Any]:
    """What is said stays."""
    return {
        "num_shards": index.num_shards or shards,
        "gpus_per_builder": per_builder if index.gpus_per_builder is None else index.gpus_per_builder,
        "gpus_per_searcher": per_searcher if index.gpus_per_searcher is None else index.gpus_per_searcher,
    }


def _rank_groups(config: Config, on_gpu: bool, sizes: Sizes) -> list[ActorGroup]:
    """Rank 0 is the process that was started; on a processor it takes no place."""
    ranks = num_ranks(config)
    gpus = min(1.0, float(config.resources.train)) if on_gpu else 0.0
    num_bytes = None if sizes.trained is None else sizes.trained + (sizes.batch or 0.0) / ranks
    numbers = range(0 if on_gpu else 1, ranks)
    return [ActorGroup((Actor(TRAINER, number, gpus, num_bytes),), on_driver=number == 0) for number in numbers]


def _index_groups(index: IndexConfig, sizes: Sizes) -> list[ActorGroup]:
    """A builder and a searcher on each GPU together, where both find room there."""
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
    builds, searches = _index_bytes(sizes.embedding, version, blue_green, apart)
    builders = [Actor(BUILDER, n, asked.gpus_per_builder, builds) for n in range(asked.num_builders)]
    shards = asked.num_shards * (2 if blue_green and not asked.gpus_per_searcher else 1)
    searchers = [Actor(SEARCHER, n, asked.gpus_per_searcher, searches) for n in range(shards)]
    if apart:
        return [ActorGroup((actor,)) for actor in [*searchers, *builders]]
    return [ActorGroup(tuple(filter(None, pair))) for pair in zip_longest(searchers, builders)]


def _index_bytes(
    embedding: float | None, version: float | None, blue_green: bool, apart: bool
) -> tuple[float | None, float | None]:
    """Of a builder's place and of a searcher's, whose part of one version has `version` bytes."""
    if version is None or not blue_green:
        return embedding, None if version is None else 2 * version
    larger = max(embedding or 0.0, version)  # the next version's searcher takes the builder's place
    return larger, larger if apart else version


def _scorers(
    config: Config | ScoreConfig, gpus: dict[str, float], packing: Packing, others: Sequence[ActorGroup], sizes: Sizes
) -> tuple[LMConfig, list[ActorGroup], int]:
    """The section with a number for each key, its groups, and how many of these wait for room."""
    lm, share = config.lm, gpus.get("score", 0.0)
    if not share:
        count = _processes(config, "score", lm.num_replicas) if isinstance(config, Config) else lm.num_replicas or 1
        each = lm.gpus_per_replica or 0.0
    else:
        each = _gpus_of_replica(lm, share, packing.nodes, sizes)
        if share < each:
            raise UserError(f"resources.score is {share:g}, less than the {each:g} GPUs of lm.gpus_per_replica")
        count = lm.num_replicas or (0 if math.isinf(share) else int(share / each + 1e-4))

    def group(number: int) -> ActorGroup:
        return ActorGroup((Actor(SCORER, number, each, sizes.scoring if each else None),), may_wait=number > 0)

    groups = [group(number) for number in range(count or 1)]
    _require_place(packing, groups[0], [*others, *groups])
    placed = 1 + sum(packing.place(one) for one in groups[1:])
    while not count and packing.place(group(placed)):
        groups.append(group(placed))
        placed += 1
    return replace(lm, num_replicas=len(groups), gpus_per_replica=each), groups, len(groups) - placed


def _gpus_of_replica(lm: LMConfig, share: float, nodes: Sequence[Node], sizes: Sizes) -> float:
    """What is said, else the share that there is, else as many as hold the LM."""
    if lm.gpus_per_replica is not None:
        return lm.gpus_per_replica
    if share < 1:
        return _share(share / (lm.num_replicas or 1))
    limit = min(node.gpu_limit for node in nodes)
    return float(max(1, math.ceil((sizes.scoring or 0.0) / limit)))


def _require_place(packing: Packing, group: ActorGroup, groups: Sequence[ActorGroup]) -> None:
    if not packing.place(group):
        if packing.lacks_memory_only(group):
            raise OutOfMemory(_describe_memory(packing, group))
        raise NoRoom(_describe_shortage(packing, group, groups))


def _describe_memory(packing: Packing, group: ActorGroup) -> str:
    parts = " + ".join(f"{NAMES[actor.key]} {_gb(actor.num_bytes or 0.0)}" for actor in group.actors)
    each = f" on each of {group.gpus:g} GPUs" if group.gpus > 1 else ""
    most = max(packing.planned(), key=lambda gpu: gpu.node.gpu_limit - gpu.num_bytes)
    others = f" and {_gb(most.num_bytes)} are taken" if most.actors else ""
    return (
        f"{group.key}: {parts} need {_gb(group.num_bytes)}{each}, but a GPU has {_gb(most.node.gpu_limit)} to give "
        f"({USABLE:.0%} of {_gb(most.node.gpu_bytes or 0.0)}){others}; expected {SMALLER[group.key]}"
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


def _notes(
    config: Config | ScoreConfig,
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
    if isinstance(config, Config) and any(a.key == SEARCHER for a in actors) and gpus and sizes.vectors is not None:
        yield from _host_notes(config.index, nodes, sizes)


def _host_notes(index: IndexConfig, nodes: Sequence[Node], sizes: Sizes) -> Iterator[str]:
    """Of a search in host memory on a cluster with GPUs."""
    if index.gpus_per_searcher:
        return
    needed = host_bytes(index, sizes, len(nodes))
    yield f"the index is searched in host memory: two versions take {_gb(needed)} of each node"
    host = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    if needed > host:
        yield f"a node's memory has {_gb(host)}, less than two versions: searches at a swap wait for the disk"


def _share(value: float) -> float:
    """Ray counts in ten-thousandths; rounded down, so that shares fit."""
    return math.floor(value * 1e4 + 1e-6) / 1e4


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def nodes_of(descriptions: Sequence[dict], driver: str, gpu_bytes: dict[str, float]) -> Iterator[Node]:
    """The living nodes of `ray.nodes()`; `driver` is the id of the command's, `gpu_bytes` are by id."""
    for node in descriptions:
        if node["Alive"]:
            resources, name = node["Resources"], node["NodeID"]
            cpus, gpus, memory = resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("memory")
            yield Node(name, cpus, gpus, gpu_bytes.get(name), memory, name == driver, node["NodeManagerAddress"])
