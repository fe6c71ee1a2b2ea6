"""Which part of a cluster trains, scores and indexes. Pure: a configuration and nodes in, numbers and sentences out.

`resources` is the short way to say it; what it leaves open stays as the keys of `lm` and `index` say.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replug.configs.errors import UserError
from replug.configs.schema import Accelerator, Config, ScoreConfig, SwapMode

ROLES = ("train", "score", "index")
EXACT_KINDS = ("flat_fp16",)  # whose vectors any number of searchers may share

OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster started here


@dataclass(frozen=True, slots=True)
class Node:
    """What Ray may hand out on one machine."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Need:
    """Actors that must all find room, each with one logical CPU and so many GPUs; `key` sets their number.

    Of those whose number is `at_least` smaller than `count`, the rest may join later.
    """

    key: str
    count: int
    gpus: float = 0.0
    at_least: int | None = None


def lay_out(config: Config, num_gpus: int) -> Config:
    """The configuration with `resources` turned into numbers of ranks, replicas and index workers.

    Raises UserError for a share of a GPU where the cluster has none.
    """
    wanted = _numbers(config, num_gpus)
    if not num_gpus:
        return _on_processors(config, wanted)
    config = replace(config, resources=replace(config.resources, train=wanted["train"] or 1))
    if (score := wanted["score"]) is not None:
        config = replace(config, lm=replace(config.lm, **_scorers(score, config.lm.gpus_per_replica)))
    if (index := wanted["index"]) is not None:
        config = replace(config, index=replace(config.index, **_index_workers(index, config.index.kind)))
    return config


def num_ranks(config: Config) -> int:
    """Trainer ranks of a configuration that is laid out."""
    return max(1, int(config.resources.train))


def needs(config: Config | ScoreConfig, roles: Collection[str], trainer_on_gpu: bool) -> list[Need]:
    """The actors of those roles, by a configuration that is laid out. Only local weights (`lm.path`) have scorers."""
    found = []
    if isinstance(config, Config) and "train" in roles:
        # Rank 0 is the process that was started; on a GPU an actor holds its place.
        ranks = num_ranks(config) - (0 if trainer_on_gpu else 1)
        gpus = min(1.0, float(config.resources.train)) if trainer_on_gpu else 0.0
        found.append(Need("resources.train", ranks, gpus))
    if isinstance(config, Config) and "index" in roles:
        index = config.index
        versions = 2 if index.swap is SwapMode.blue_green else 1  # that have searchers of their own during a swap
        found.append(Need("index.num_shards", versions * index.num_shards, index.gpus_per_searcher))
        found.append(Need("index.num_builders", index.num_builders, index.gpus_per_builder))
    if config.lm.path and "score" in roles:
        found.append(Need("lm.num_replicas", config.lm.num_replicas, config.lm.gpus_per_replica, at_least=1))
    return [need for need in found if need.count]


def logical_cpus(wanted: Sequence[Need]) -> int:
    return sum(need.count for need in wanted)


def shortage(nodes: Sequence[Node], wanted: Sequence[Need]) -> str | None:
    """One sentence on what the nodes lack for the least that is needed; None where all find room."""
    room = [_Room(node) for node in nodes]
    for need in sorted(wanted, key=lambda need: -need.gpus):
        least = need.count if need.at_least is None else min(need.at_least, need.count)
        placed = sum(_place(room, need.gpus) for _ in range(least))
        if placed < least:
            return _describe_shortage(nodes, wanted, need, placed, least)
    return None


def latecomers(nodes: Sequence[Node], wanted: Sequence[Need]) -> int:
    """How many actors find no room yet, and may join when a node does."""
    room = [_Room(node) for node in nodes]
    order = sorted(wanted, key=lambda need: (need.at_least is not None, -need.gpus))
    return sum(not _place(room, need.gpus) for need in order for _ in range(need.count))


def describe(wanted: Sequence[Need]) -> str:
    """One line on who does what."""
    return ", ".join(f"{need.key} {need.count}" + (f" x {need.gpus:g} GPU" if need.gpus else "") for need in wanted)


class _Room:
    """What is left of a node: CPUs, and of each GPU a share."""

    def __init__(self, node: Node) -> None:
        self.cpus, self.gpus = node.cpus, [1.0] * int(node.gpus)

    def fits(self, gpus: float) -> bool:
        return self.cpus >= 1 and len(self._chosen(gpus)) >= gpus

    def take(self, gpus: float) -> None:
        self.cpus -= 1
        for number in self._chosen(gpus):
            self.gpus[number] = round(self.gpus[number] - min(1.0, gpus), 6)

    def _chosen(self, gpus: float) -> list[int]:
        """Whole GPUs, or the fullest one with so large a share left: a share is never spread."""
        fitting = [number for number, free in enumerate(self.gpus) if free >= min(1.0, gpus)]
        return sorted(fitting, key=lambda number: self.gpus[number])[: math.ceil(gpus)]


def _place(room: Sequence[_Room], gpus: float) -> bool:
    """Take a place on a node that has it: with GPUs on the one with the fewest left, else where most CPUs are."""
    fitting = [node for node in room if node.fits(gpus)]
    if not fitting:
        return False
    chosen = min(fitting, key=lambda node: (sum(node.gpus), node.cpus) if gpus else (0.0, -node.cpus))
    chosen.take(gpus)
    return True


def _describe_shortage(nodes: Sequence[Node], wanted: Sequence[Need], need: Need, placed: int, least: int) -> str:
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    all_cpus = sum(w.count if w.at_least is None else min(w.at_least, w.count) for w in wanted)
    all_gpus = sum(w.gpus * (w.count if w.at_least is None else min(w.at_least, w.count)) for w in wanted)
    each = f", each {need.gpus:g} GPU" if need.gpus else ""
    return (
        f"the cluster has {cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} nodes, but the actors need at least "
        f"{all_cpus} CPUs and {all_gpus:g} GPUs ({' + '.join(w.key for w in wanted)}): {placed} of {least} actors "
        f"of {need.key}{each} find room"
    )


def _numbers(config: Config, num_gpus: int) -> dict[str, float | int | None]:
    """What each role gets, `auto` resolved."""
    asked = {role: getattr(config.resources, role) for role in ROLES}
    automatic = dict(zip(asked, _automatic(num_gpus), strict=True))
    if config.lm.path is None:
        automatic["score"] = None
    automatic["train"] = _dividing(config, automatic["train"])
    return {role: automatic[role] if value == "auto" else value for role, value in asked.items()}


def _dividing(config: Config, ranks: float | int | None) -> float | int | None:
    """So many ranks, or fewer, that all have parts of one size."""
    parts = config.train.batch_size // config.train.micro_batches
    return next((n for n in range(int(ranks or 0), 1, -1) if parts % n == 0), min(ranks or 1, 1))


def _automatic(num_gpus: int) -> tuple[float | int | None, ...]:
    """Train, score, index. The LM has by far the most to do: of eight GPUs six score (a paper-size run's hours)."""
    if num_gpus == 0:
        return 1, None, None
    if num_gpus == 1:
        return 0.25, 0.5, 0.25
    if num_gpus == 2:
        return 0.5, 1, 0.5
    trains = indexes = max(1, num_gpus // 8)
    return trains, num_gpus - trains - indexes, indexes


def _on_processors(config: Config, wanted: dict[str, float | int | None]) -> Config:
    for role, value in wanted.items():
        if value is not None and value < 1:
            raise UserError(
                f"resources.{role} is {value}, a share of a GPU, but the cluster has no GPU; expected a number of "
                "processes, or auto"
            )
    config = replace(config, resources=replace(config.resources, train=wanted["train"] or 1))
    if (score := wanted["score"]) is not None:
        config = replace(config, lm=replace(config.lm, num_replicas=int(score)))
    if (index := wanted["index"]) is not None:
        config = replace(config, index=replace(config.index, num_builders=int(index)))
    return config


def _scorers(gpus: float, gpus_per_replica: float) -> dict[str, Any]:
    """An LM that takes several GPUs takes them for each replica."""
    if gpus < 1:
        return {"num_replicas": 1, "gpus_per_replica": gpus}
    each = max(1.0, gpus_per_replica)
    if gpus < each:
        raise UserError(f"resources.score is {gpus:g}, less than the {each:g} GPUs of lm.gpus_per_replica")
    return {"num_replicas": int(gpus // each), "gpus_per_replica": each}


def _index_workers(gpus: float, kind: str) -> dict[str, Any]:
    """Builders and searchers share GPUs half and half; lossy kinds, which are small, are searched on processors."""
    count = max(1, math.floor(gpus))
    if kind not in EXACT_KINDS:
        return {"num_builders": count, "gpus_per_builder": min(1.0, gpus), "gpus_per_searcher": 0.0}
    half = min(1.0, gpus) / 2
    workers: dict[str, Any] = {"num_builders": count, "gpus_per_builder": half}
    return {**workers, "num_shards": count, "gpus_per_searcher": half}


def trains_on_gpu(config: Config | ScoreConfig, has_gpu: bool) -> bool:
    """Whether the trainer runs on a GPU. Raises UserError where it must and there is none."""
    if isinstance(config, ScoreConfig) or config.train.accelerator is Accelerator.cpu:
        return False
    if config.train.accelerator is Accelerator.gpu and not has_gpu:
        raise UserError("train.accelerator is gpu, but torch finds no GPU on this machine; expected auto or cpu")
    return has_gpu


def nodes_of(descriptions: Sequence[dict]) -> Iterator[Node]:
    """The living nodes of `ray.nodes()`."""
    for node in descriptions:
        if node["Alive"]:
            resources = node["Resources"]
            yield Node(node["NodeManagerAddress"], resources.get("CPU", 0.0), resources.get("GPU", 0.0))
