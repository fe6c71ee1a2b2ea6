"""Places of a layout's actors on the connected cluster, with their GPUs reserved.

`reserve` makes a placement group for each GPU before any actor starts, so that actors of one GPU meet and rank 0 finds
its GPU on the command's own node. Ray chooses the nodes. A process has one connection to Ray, and so one set of places.

`nvidia-smi` tells a GPU's free memory; it makes no context there.
"""

import logging
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from replug.cluster.layout import SCORER, SEARCHER, TRAINER, IndexActors, Layout, Node, PlannedGPU
from replug.config.errors import RunError, UserError

log = logging.getLogger(__name__)

MEMORY_BOUND = "REPLUG_GPU_MEMORY_BOUND"  # bytes of a process on a GPU that others compute on too
SMI_SECONDS = 60.0  # for nvidia-smi, which wakes GPUs that sleep
RESERVE_SECONDS = 60.0  # for GPUs that another job gives back
ASK_SECONDS = 60.0  # for a node to describe its GPUs: torch is imported there
RANK_0_SECONDS = 600.0  # for rank 0's place to answer: a resumed run starts all its actors at that moment
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # of an actor without GPUs: else it would take the first of the node, uncounted

_groups: list[PlacementGroup] = []
_options: dict[tuple[str, int], dict[str, Any]] = {}  # Ray's, by key and number of an actor
_memory: dict[tuple[str, int], float] = {}  # bytes of an actor on a GPU that roles share
_index: list[IndexActors] = []  # of the layout, none without one


# A GPU as a process on its node sees it: Ray's id, and torch's name of it (None where torch sees none).
SeenGPU = tuple[str, str | None]


def reserve(layout: Layout) -> None:
    """Hold the layout's GPUs for its actors. Raises UserError if another job has them."""
    _index[:] = [layout.index]
    for actor in layout.actors:
        _options[actor.key, actor.number] = {"num_gpus": actor.gpus}
        if layout.gpus and actor.key == SEARCHER and not actor.gpus:  # host memory of every node
            _options[actor.key, actor.number]["scheduling_strategy"] = "SPREAD"
    for gpu in layout.gpus:  # rank 0's first, before others take its node's GPUs
        _groups.append(group := _group(gpu))
        if not group.wait(RESERVE_SECONDS):
            raise UserError(
                f"ray.address: a GPU for {gpu.describe()} is not free within {RESERVE_SECONDS:g} s, though the cluster "
                "has enough of them: does another job hold it? `ray status` shows the GPUs in use"
            )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        for actor in gpu.actors:
            _options[actor.key, actor.number]["scheduling_strategy"] = strategy
            if bound := gpu.memory_bound(actor):
                _memory[actor.key, actor.number] = bound


def forget(cluster_stays: bool = False) -> None:
    """Forget the places, which end with the connection; release them if the process keeps its cluster."""
    for group in _groups if cluster_stays else ():
        remove_placement_group(group)
    for known in (_groups, _options, _memory, _index):
        known.clear()


Places = tuple[dict[tuple[str, int], Any], ...]


def shared_places() -> Places:
    """Return the places for an actor that starts some of the actors."""
    return _options, _memory


def take_places(places: Places) -> None:
    """Take the places that another process holds."""
    for known, given in zip(shared_places(), places, strict=True):
        known.update(given)


def index_actors() -> IndexActors:
    """Return the actors of the index as they are laid out; without a layout one of each, on processors."""
    return _index[0] if _index else IndexActors()


def scorer_actors() -> tuple[int, float]:
    """Return the scorers of the layout, and the GPUs of each; without a layout one, on processors."""
    gpus = [options["num_gpus"] for (key, _), options in _options.items() if key == SCORER]
    return len(gpus) or 1, max(gpus, default=0.0)


def place(key: str, number: int, env: dict[str, str]) -> dict[str, Any]:
    """Return Ray's options of one actor: a logical CPU, its GPUs, where it is put, and its environment."""
    options = {"num_gpus": 0.0, "scheduling_strategy": "DEFAULT", **_options.get((key, number), {})}
    if bound := memory_bound(key, number):
        env = {**env, MEMORY_BOUND: str(bound)}
    return {
        "num_cpus": 1,
        **options,
        "runtime_env": {"env_vars": env if options["num_gpus"] else {**env, **NO_GPU}},
    }


def memory_bound(key: str, number: int) -> float | None:
    """Return the bytes that torch may take of a shared GPU. None means no bound."""
    return _memory.get((key, number))


def gpu_of_rank_0() -> SeenGPU:
    """Return the GPU that a process in rank 0's place sees. Raises RunError if none answers there."""
    ask = ray.remote(max_calls=1)(_seen)  # its process ends, and leaves nothing on the GPU
    try:
        seen: SeenGPU = ray.get(ask.options(**place(TRAINER, 0, {})).remote(), timeout=RANK_0_SECONDS)
    except RayError as error:
        why = f"no answer within {RANK_0_SECONDS:g} s" if isinstance(error, GetTimeoutError) else _last_line(error)
        raise RunError(
            f"the GPU that is held for trainer rank 0 does not answer: {why}; `ray status` shows the cluster's state, "
            "and the same command resumes"
        ) from error
    return seen


def device_of(gpu: SeenGPU) -> int:
    """Return torch's number of a GPU in this process; Ray's own number of it may differ."""
    ray_id, uuid = gpu
    own = [_uuid(number) for number in range(torch.cuda.device_count())]
    if uuid is None or own.count(uuid) != 1:
        raise UserError(
            f"Ray gives rank 0 the GPU {ray_id} ({uuid or 'which its workers do not see'}), but this command "
            f"sees {', '.join(own) or 'none'}: expected CUDA_VISIBLE_DEVICES as Ray was started with; it is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
    return own.index(uuid)


def free_memory(nodes: Sequence[Node]) -> dict[str, float | None]:
    """Return the free bytes on each of a node's GPUs, by the node's name; nodes that do not answer are left out."""
    if torch.version.cuda is None and torch.version.hip is None:
        return {}
    ask: Any = ray.remote(max_calls=1)(free_bytes)
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
    free: dict[str, float | None] = {}
    for answer in answered:
        try:
            free[requested[answer].name] = ray.get(answer)
        except RayError as error:
            log.warning(f"a node does not describe its GPUs: {_last_line(error)}")
    return free


def _group(gpu: PlannedGPU) -> PlacementGroup:
    """Hold a GPU: rank 0's on the command's node, others there too if they find room, else where Ray chooses."""
    here = ray.get_runtime_context().get_node_id()
    is_rank_0s = any(actor.key == TRAINER and actor.number == 0 for actor in gpu.actors)
    return placement_group(
        [{"CPU": len(gpu.actors), "GPU": gpu.count}],
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


# The memory of GPUs -----------------------------------------------------------------------------------------------


def free_bytes(count: int | None = None) -> float | None:
    """Return the bytes that are free on the fullest of the GPUs that this process sees, or of the first `count`.

    All memory counts as free without nvidia-smi, as on AMD's GPUs and in some containers. None without GPUs.
    """
    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())][:count]
    known: dict[str, float] = {}
    if seen and (program := shutil.which("nvidia-smi")) is not None:
        query = [program, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
        printed = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS).stdout
        rows = (line.partition(",") for line in printed.splitlines())
        known = {uuid.removeprefix("GPU-"): float(free) * 2**20 for uuid, _, free in rows if free.strip().isdigit()}
    return min((min(float(gpu.total_memory), known.get(str(gpu.uuid), math.inf)) for gpu in seen), default=None)


def keep_to_memory_bound(num_bytes: float | None = None, device: int = 0) -> None:
    """Limit torch to this process's part of a GPU's memory, by default the part that it was started with.

    A growing cache would take memory of another process. And a pass that does not fit is halved, which changes last
    bits: that must depend on this process's work alone.
    """
    num_bytes = num_bytes or float(os.environ.get(MEMORY_BOUND, 0.0))
    if num_bytes and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / whole), device)
