"""Places of actors on the cluster that this process is connected to: GPUs held for those that a layout puts there.

`reserve` holds them before any actor starts, a placement group for each GPU, so that actors of one GPU meet and rank 0
finds its GPU on the command's own node. Ray chooses the nodes. It is one for each process, and so are its places.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from replug.cluster.gpus import MEMORY_BOUND, gpu_state
from replug.cluster.layout import IndexActors, Layout
from replug.cluster.packing import SEARCHER, TRAINER, Node, PlannedGPU
from replug.config.errors import RunError, UserError

log = logging.getLogger(__name__)

RESERVE_SECONDS = 60.0  # for GPUs that another job gives back
ASK_SECONDS = 60.0  # for a node to say what GPUs it has: torch is imported there
RANK_0_SECONDS = 600.0  # for rank 0's place to answer: a resumed run starts all its actors at that moment
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # of an actor without GPUs: else it would take the first of the node, uncounted

_groups: list[PlacementGroup] = []
_strategies: dict[tuple[str, int], Any] = {}  # by key and number of an actor
_gpus: dict[tuple[str, int], float] = {}  # its share as Ray counts
_memory: dict[tuple[str, int], float] = {}  # its part, on a GPU that roles share
_index: list[IndexActors] = []  # of the layout, none without one


# A GPU as a process on its node sees it: Ray's id, and torch's name of it (None where torch sees none).
SeenGPU = tuple[str, str | None]
GPUState = tuple[float, bool]  # as of `gpu_state`


def reserve(layout: Layout) -> None:
    """Hold the layout's GPUs for its actors. Raises UserError where somebody else has them."""
    _index[:] = [layout.index]
    for gpu in layout.gpus:
        for actor in gpu.actors:
            _gpus[actor.key, actor.number] = actor.gpus
            if bound := gpu.memory_bound(actor):
                _memory[actor.key, actor.number] = bound
    for gpu in layout.reserved:  # rank 0's first, before others take its node's GPUs
        _groups.append(group := _group(gpu))
        if not group.wait(RESERVE_SECONDS):
            raise UserError(
                f"ray.address: a GPU for {gpu.describe()} is not free within {RESERVE_SECONDS:g} s, though the cluster "
                "has enough of them: does another job hold it? `ray status` says what is taken"
            )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        _strategies.update({(actor.key, actor.number): strategy for actor in gpu.actors})
    if layout.gpus:  # searches in host memory want the memory of every node
        hosts = [actor for actor in layout.actors if actor.key == SEARCHER and not actor.gpus]
        _strategies.update({(actor.key, actor.number): "SPREAD" for actor in hosts})


def forget(cluster_stays: bool = False) -> None:
    """Forget the places, which are gone with the connection; give them back to a cluster that this process keeps."""
    for group in _groups if cluster_stays else ():
        remove_placement_group(group)
    for known in (_groups, _strategies, _gpus, _memory, _index):
        known.clear()


Places = tuple[dict[tuple[str, int], Any], ...]


def shared_places() -> Places:
    """Return the places for an actor that starts some of the actors."""
    return _strategies, _gpus, _memory


def take_places(places: Places) -> None:
    """Take the places that another process holds."""
    for known, given in zip(shared_places(), places, strict=True):
        known.update(given)


def index_actors() -> IndexActors:
    """Return the actors of the index as they are laid out; without a layout one of each, on processors."""
    return _index[0] if _index else IndexActors()


def place(key: str, number: int, gpus: float, env: dict[str, str]) -> dict[str, Any]:
    """Return Ray's options of one actor: a logical CPU, its GPUs, where it is put, and its environment.

    `gpus` are those of an actor for which the layout has no room yet.
    """
    if bound := memory_bound(key, number):
        env = {**env, MEMORY_BOUND: str(bound)}
    gpus = _gpus.get((key, number), gpus)
    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "scheduling_strategy": _strategies.get((key, number), "DEFAULT"),
        "runtime_env": {"env_vars": env if gpus else {**env, **NO_GPU}},
    }


def memory_bound(key: str, number: int) -> float | None:
    """Return the bytes that torch may take of a shared GPU. None means no bound."""
    return _memory.get((key, number))


def gpu_of_rank_0(gpus: float) -> SeenGPU:
    """Ask a process in its place. Raises RunError if none answers there."""
    ask = ray.remote(max_calls=1)(_seen)  # its process ends, and leaves nothing on the GPU
    try:
        seen: SeenGPU = ray.get(ask.options(**place(TRAINER, 0, gpus, {})).remote(), timeout=RANK_0_SECONDS)
    except RayError as error:
        why = f"no answer within {RANK_0_SECONDS:g} s" if isinstance(error, GetTimeoutError) else _last_line(error)
        raise RunError(
            f"the GPU that is held for trainer rank 0 cannot be asked for: {why}; `ray status` says what the cluster "
            "does, and the same command goes on"
        ) from error
    return seen


def device_of(gpu: SeenGPU) -> int:
    """Return torch's number of a GPU among those that this process sees, whatever Ray's number of it is."""
    ray_id, uuid = gpu
    own = [_uuid(number) for number in range(torch.cuda.device_count())]
    if uuid is None or own.count(uuid) != 1:
        raise UserError(
            f"Ray gives rank 0 the GPU {ray_id} ({uuid or 'which its workers do not see'}), but this command "
            f"sees {', '.join(own) or 'none'}: expected CUDA_VISIBLE_DEVICES as Ray was started with; it is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
    return own.index(uuid)


def gpu_states(nodes: Sequence[Node]) -> dict[str, GPUState]:
    """Return the state of each node's GPUs, by the node's name; nodes that do not answer are left out."""
    if torch.version.cuda is None and torch.version.hip is None:
        return {}
    ask: Any = ray.remote(max_calls=1)(gpu_state)
    requested = {
        ask.options(
            num_cpus=0,
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},  # else it sees none or one
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, False),
        ).remote(int(node.gpus)): node
        for node in nodes
        if node.gpus
    }
    answered, _ = ray.wait(list(requested), num_returns=len(requested), timeout=ASK_SECONDS) if requested else ([], [])
    states: dict[str, GPUState | None] = {}
    for answer in answered:
        try:
            states[requested[answer].name] = ray.get(answer)
        except RayError as error:
            log.warning(f"a node does not say what GPUs it has: {_last_line(error)}")
    return {name: state for name, state in states.items() if state is not None}


def _group(gpu: PlannedGPU) -> PlacementGroup:
    """Hold a GPU: rank 0's on the command's node, others there too if they find room, else where Ray chooses."""
    here = ray.get_runtime_context().get_node_id()
    is_rank_0s = any(actor.key == TRAINER and actor.number == 0 for actor in gpu.actors)
    return placement_group(
        [{"CPU": len(gpu.actors), "GPU": 1}],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": here}] if is_rank_0s else None,
        _soft_target_node_id=None if is_rank_0s else here,
    )


def _last_line(error: RayError) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _seen() -> SeenGPU:
    ray_id = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
    return ray_id, _uuid(0) if torch.cuda.is_available() else None


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
