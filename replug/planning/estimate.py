"""Estimate a training run: its stages with LM calls and hours, tokens, memory and disk, by closed formulas.

A unit of work is its FLOP divided by the rate that a role reaches. A role divides its work evenly over its GPUs. A live
step takes as long as the busiest GPU, on which roles take turns; the search in host memory runs beside them.
"""

from dataclasses import asdict
from typing import Any

import psutil

from replug.cluster.environment import allowed_cores
from replug.cluster.layout import BUILDER, NAMES, SCORER, SEARCHER, TRAINER, Layout, PlannedGPU, lay_out
from replug.config.errors import UserError
from replug.config.rules import is_live
from replug.config.schema import Config
from replug.data.prepare.reading import num_processes
from replug.data.sources.shards import SOURCE_SHARD_BYTES
from replug.index_workers.kinds import EXACT
from replug.planning.accelerators import Devices, parse_devices
from replug.planning.memory import disk_bytes, host_bytes, run_sizes, trained_weights
from replug.planning.model_sizes import ModelSize, lm_size, retriever_size
from replug.planning.stages import (
    PREPARING,
    TRAINING,
    Counts,
    Lengths,
    Stage,
    count_texts,
    lengths,
    num_candidates,
    preparing_stage,
    refreshes,
    run_stages,
    trains_documents,
)

# Measured on one H200 (docs/gpu.md): the slow-down of a training step by chunks; seconds of a GPU for a query's product
# with a vector and its part of the k best.
CHUNKED, PRODUCT = 3.3, 2.1e-10
# Seconds of a builder for a document, with any encoder: to read ids, and to check, hash and write 128 numbers.
HANDLING = 2.4e-6
# A preparing process: bytes cut in a second, and documents compared, written and verified (docs/scale.md).
CUT_BYTES, KEPT_DOCUMENTS = 3.0e6, 1.1e4
# Rates of one core in an exact search: seconds to read a stored number, and FLOP a second (docs/scale.md).
CORE_READS, CORE_FLOP = 7.5e-10, 1.24e11
HOST_CORES = 64  # of a node that searches on its processors
# Seconds of the process that feeds the scorers, for each pair and for each scorer (benchmarks/pool_overhead.py).
FED_PAIR, FED_SCORER = 1.6e-5, 4e-4
RING_WITHIN, RING_BETWEEN = 1e11, 1e10  # bytes a second of gradients: within a node (NVLink), between nodes (100 Gbit)
NOT_COUNTED = "texts are estimated by their bytes or keys, since no files of rows are here to count"
ROLES = {SCORER: "score", BUILDER: "embed", SEARCHER: "search", TRAINER: "train"}


def plan_training(
    config: Config, gpus: str | None = None, nodes: int | None = None, num_documents: int | None = None
) -> dict[str, Any]:
    """Plan a run on GPUs or on this machine. Raises UserError for a run that cannot be planned or does not fit."""
    counts, is_exact = count_texts(config, num_documents)
    devices, retriever = parse_devices(gpus, nodes), retriever_size(config.retriever)
    lm = lm_size(config.lm.path) if config.lm.path else None
    roles = ("train", "score", "index") if is_live(config) else ("score", "index")
    layout = lay_out(config, devices.as_nodes(), run_sizes(config, counts.documents, devices.has_bfloat16), roles)
    held = host_bytes(layout, counts.documents, devices.has_bfloat16, devices.nodes)
    if devices.model is None and held > (total := psutil.virtual_memory().total):
        raise UserError(
            f"this machine has {total / 1e9:.0f} GB of memory, but trainer, LM and index take {held / 1e9:.0f} GB; "
            "expected a smaller lm.path, fewer documents, index.kind=ivf_pq, or GPUs (--gpus 8xA100)"
        )
    speeds, stages = Speeds(config, counts, layout, devices, retriever, lm), run_stages(config, counts)
    preparing = None if is_exact or devices.model else preparing_stage(config, counts)
    stages = [preparing, *stages] if preparing else stages
    seconds = [speeds.seconds(stage) for stage in stages]
    hours = None if None in seconds else sum(filter(None, seconds)) / 3600
    disk, calls = disk_bytes(layout.config, counts), sum(stage.pairs for stage in stages)
    return {
        "devices": str(devices),
        "texts": asdict(counts),
        "lm_calls": calls,
        "tokens": calls * lengths(config).pair,
        "stages": [{**asdict(one), "seconds": took} for one, took in zip(stages, seconds, strict=True)],
        "wall_hours": hours,
        "gpus": gpus_by_roles(layout),
        "host_gb": held / 1e9,
        "disk_gb": {name: value / 1e9 for name, value in {**disk, "total": sum(disk.values())}.items()},
        "notes": [] if is_exact else [NOT_COUNTED],
    }


def pair_flop(lm: ModelSize, size: Lengths) -> float:
    """Return the FLOP of scoring a pair: all its tokens, and the output layer at the continuation's tokens."""
    return size.pair * lm.flop_per_token(size.pair) + size.continuation * lm.flop_per_prediction


def _step_flop(config: Config, retriever: ModelSize) -> float:
    """Return the FLOP of a step. It encodes the candidates of labels only if documents are trained."""
    size, train = lengths(config), config.train
    query, document = (
        tokens * retriever.flop_per_token(tokens) for tokens in (size.encoded_query, size.encoded_document)
    )
    k = config.retrieve.k if is_live(config) else num_candidates(config) if trains_documents(config) else 0
    passes = 3 if config.lora.rank is None else 2  # forward, and the gradients of activations and of weights
    again = CHUNKED if train.chunk_tokens else 1.0
    searching = query if is_live(config) else 0.0
    return train.batch_size * (again * passes * (query + k * document) + searching)


class Speeds:
    """Seconds of one device for a unit of each kind of work: its FLOP, divided by the rate that its role reaches.

    `pair` is None for an LM of unknown speed. `step` is of one rank with the whole batch, `exchange` of the gradients
    between several ranks; `search` is of one batch, on a GPU or on the processors of a node.
    """

    def __init__(
        self,
        config: Config,
        counts: Counts,
        layout: Layout,
        devices: Devices,
        retriever: ModelSize,
        lm: ModelSize | None,
    ) -> None:
        self._config, self._counts, self._layout = config, counts, layout
        self._devices, size = _devices_of(layout), lengths(config)
        self._pair = None if lm is None else pair_flop(lm, size) / devices.rate(config.lm.dtype.value, "score")
        document = size.encoded_document * retriever.flop_per_token(size.encoded_document)
        self._document = max(HANDLING, document / devices.rate(config.index.dtype.value, "embed"))
        self._step = _step_flop(config, retriever) / devices.rate(config.train.precision.value, "train")
        ranks, gradients = self._devices["train"], 4 * trained_weights(config, retriever)[1]
        ring = RING_WITHIN if ranks <= devices.count / devices.nodes else RING_BETWEEN
        self._exchange = 2 * gradients * (ranks - 1) / ranks / ring
        self._search = self._search_seconds(config.index.dims or retriever.dim)

    def seconds(self, stage: Stage) -> float | None:
        """Return the seconds of a stage; None where the LM's speed is not known."""
        config, counts, devices = self._config, self._counts, self._devices
        if stage.name == PREPARING:
            processes = num_processes(stage.num_bytes // SOURCE_SHARD_BYTES, allowed_cores())
            return (stage.num_bytes / CUT_BYTES + counts.documents / KEPT_DOCUMENTS) / processes
        if stage.pairs and self._pair is None:
            return None
        pair = (self._pair or 0.0) / devices["score"]
        if stage.name != TRAINING:
            return stage.pairs * pair + stage.documents * self._document / devices["embed"]
        if not is_live(config):
            texts = (counts.queries + counts.dev) * num_candidates(config)
            once = 0.0 if trains_documents(config) else min(texts, counts.documents) * self._document
            return once + stage.steps * (self._step / devices["train"] + self._exchange)
        steps, policy, step = config.train.max_steps, refreshes(config), self._live_step(pair)
        build = counts.documents * self._document / devices["embed"]
        development = stage.pairs - steps * config.train.batch_size * config.retrieve.k
        # On separate GPUs a refresh runs beside the steps until it is due; on shared GPUs it delays them.
        is_alone = any(_roles_on(gpu) and _roles_on(gpu) <= {"embed", "search"} for gpu in self._layout.gpus)
        late = max(0.0, build - policy.lag_steps * step) if is_alone else build
        return steps * step + policy.num_starts * late + development * pair

    def _live_step(self, pair: float) -> float:
        """Return the seconds of a live step: the longest of the GPUs, the search in host memory and the feeder."""
        layout, pairs = self._layout, self._config.train.batch_size * self._config.retrieve.k
        work = {
            "score": pairs * pair,
            "train": self._step / self._devices["train"] + self._exchange,
            "search": self._search / self._devices["search"],
            "embed": 0.0,
        }
        if not layout.gpus:
            return sum(work.values())
        groups = {_roles_on(gpu) for gpu in layout.gpus}
        groups |= set() if _searches_on_gpu(layout) else {frozenset(["search"])}
        fed = pairs * FED_PAIR + self._devices["score"] * FED_SCORER
        return max(fed, *(sum(work[role] for role in roles) for roles in groups))

    def _search_seconds(self, dim: int) -> float:
        """Return the seconds of one GPU, or of one node's processors, to search a batch. Lossy kinds take none."""
        if self._config.index.kind != EXACT:
            return 0.0
        batch, documents = self._config.train.batch_size, self._counts.documents
        if _searches_on_gpu(self._layout):
            return PRODUCT * batch * documents
        cores = HOST_CORES if self._layout.gpus else allowed_cores()
        return dim * documents * (CORE_READS + 2 * batch / CORE_FLOP) / cores


def _roles_on(gpu: PlannedGPU) -> frozenset[str]:
    return frozenset(ROLES[actor.key] for actor in gpu.actors)


def _searches_on_gpu(layout: Layout) -> bool:
    return any("search" in _roles_on(gpu) for gpu in layout.gpus)


def _devices_of(layout: Layout) -> dict[str, int]:
    """Return the GPUs of each role, at least one; nodes search where GPUs do not."""
    counts = {role: max(1, sum(gpu.count for gpu in layout.gpus if role in _roles_on(gpu))) for role in ROLES.values()}
    if not _searches_on_gpu(layout):
        counts["search"] = layout.index.num_shards
    return counts


def gpus_by_roles(layout: Layout) -> list[dict[str, Any]]:
    """Group the GPUs of a layout by their roles and the memory taken."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for gpu in layout.gpus:
        roles, taken = sorted({NAMES[actor.key] for actor in gpu.actors}), round(gpu.num_bytes / 1e9, 3)
        limit = gpu.limit / 1e9
        kind = kinds.setdefault((*roles, taken), {"roles": roles, "count": 0, "gb": taken, "limit_gb": limit})
        kind["count"] += gpu.count
    return list(kinds.values())
