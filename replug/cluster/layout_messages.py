"""What a user is told of a layout: what finds no room, which keys change that, what may surprise. Pure."""

import math
from collections.abc import Iterator, Sequence

from replug.cluster.gpu_shares import Sizes, host_bytes
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
from replug.config.errors import UserError
from replug.config.schema import Config, IndexConfig

SMALLER = {
    TRAINER: "train.chunk_tokens=8192, train.gradient_checkpointing=true, a larger train.micro_batches, or more ranks "
    "(resources.train)",
    SEARCHER: "more index.num_shards, index.gpus_per_searcher=0 (host memory), or index.kind=ivf_pq",
    BUILDER: "a smaller index.tokens_per_batch, or more GPUs (resources.index)",
    SCORER: "a larger lm.gpus_per_replica, a smaller lm.tokens_per_batch, or fewer GPUs (resources.score)",
}


class NoRoom(UserError):
    """Actors that find no place on the nodes."""


class OutOfMemory(NoRoom):
    """Actors that their GPU's memory does not hold."""


def describe_memory(packing: Packing, group: ActorGroup) -> str:
    parts = " + ".join(f"{NAMES[actor.key]} {_gb(actor.num_bytes or 0.0)}" for actor in group.actors)
    each = f" on each of {group.gpus:g} GPUs" if group.gpus > 1 else ""
    open_to_it = [gpu for gpu in packing.planned() if not (packing.spread and gpu.has(group.key))]
    most = max(open_to_it, key=lambda gpu: gpu.node.gpu_limit - gpu.num_bytes)
    others = f" and {_gb(most.num_bytes)} are taken" if most.actors else ""
    return (
        f"{group.key}: {parts} need {_gb(group.num_bytes)}{each}, but a GPU has {_gb(most.node.gpu_limit)} to give "
        f"({USABLE:.0%} of {_gb(most.node.gpu_bytes or 0.0)}){others}; expected {SMALLER[group.key]}"
    )


def describe_shortage(packing: Packing, group: ActorGroup, groups: Sequence[ActorGroup]) -> str:
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


def notes_on(
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
    if any(a.key == SEARCHER for a in actors) and gpus and sizes.vectors is not None:
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


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
