"""Hours of a run on GPUs, in closed form: work divided by rates, and the slowest role sets the pace of a step. Pure.

`pace_of_split` is for roles with GPUs of their own, `pace_of_shared` for roles that share GPUs in time slices. A
simulation of the same run by discrete events gave the same hours within a thousandth for splits, and 2% to 16% less
for shared GPUs.
"""

import math
import re
from dataclasses import dataclass

from replug.config.schema import Config
from replug.index_workers.kinds import IndexKind, bytes_per_vector, num_lists
from replug.models.batching import LMShape, tokens_per_unit
from replug.planning.accelerators import Devices
from replug.planning.memory import GRADIENT_BYTES, TrainedPart, trained_part
from replug.planning.model_sizes import ModelSize, lm_size, retriever_size
from replug.planning.workload import IndexSize, Shape, Workload, index_size, searched_width, shape_of, work_of

ROLES = ("score", "embed", "train", "search")
RANK_0 = "rank_0"  # whose interpreter has the pairs of a step scored
HOST_CORES, HOST_BANDWIDTH = 64, 1e11  # of a node that searches on its processors; bytes a second
RING_WITHIN, RING_BETWEEN = 1e11, 1e10  # bytes a second of gradients: within a node (NVLink), between nodes (100 Gbit)
# Measured on one H200 (docs/gpu.md).
RECOMPUTED, CHUNKED = 1.9, 3.3  # times as long a training step takes with gradient checkpointing, and in chunks
BESIDE = 0.5  # of its own time that a rank's step takes longer for each role that is busy on its GPU
PRODUCT = 2.1e-10  # seconds of a GPU for a query's product with a vector and its part of the k best
# Seconds of rank 0's interpreter in a step: of each, of each pair, and of each replica (benchmarks.pool_overhead).
RANK_0_STEP, RANK_0_PAIR, RANK_0_REPLICA = 5e-3, 3.2e-5, 1.2e-3
HEADROOM = 1.3  # of a rank beside others: a step also waits for units of pairs that its GPU slows down

# Of one core that searches, measured on a Xeon with AVX512 (docs/benchmarks.md).
CORE_FLOP = 7e10  # float32 products of an exact search, the reading and the top-k among them
CENTROID_FLOP = 8.7e9  # products with all centroids, the choice of the nearest among them
GRAPH = 0.1  # of that, where a graph finds the lists (`IVF32768_HNSW32,...`)
CODE_RATES = {r"x4fs": 2.3e10, r"RaBitQ": 4e9, r"PQ\d+": 2.6e9, r"SQ(?:fp16|bf16|\d)": 5e9, r"Flat": 1.2e10}  # bytes/s
CANDIDATE, CANDIDATE_NUMBER = 6e-7, 1.7e-9  # of a document that is ordered by its stored vector, and of each number
LIST = 5e-7  # of a list that one query looks into


@dataclass(frozen=True, slots=True)
class Job:
    """All of a plan that does not depend on the split."""

    config: Config
    shape: Shape
    retriever: ModelSize
    trained: TrainedPart
    lm: ModelSize
    index: IndexSize
    work: Workload


def job_of(
    config: Config,
    lm_parameters: float | None = None,
    retriever_parameters: float | None = None,
    num_documents: int | None = None,
    device: str = "cuda",
) -> Job:
    """Return the job of a configuration. Raises UserError if the size of a model or the corpus is unknown."""
    shape = shape_of(config, num_documents, device)
    retriever = retriever_size(config.retriever, retriever_parameters)
    lm = lm_size(str(config.lm.path or config.lm.model), lm_parameters)
    searched = searched_width(config, retriever.dim)
    index = index_size(config, searched, shape.num_documents)
    trained = trained_part(config, retriever)
    work = work_of(shape, retriever, lm, index.probed_share, searched, trained.flop_factor)
    return Job(config, shape, retriever, trained, lm, index, work)


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs by role. Roles in `shared` are on the same one and take turns; searches are where the index is.

    `gpus_per_replica` of the GPUs in `score` hold one LM together. Where the roles have more GPUs together than there
    are, they share them (`shares`). The layout decides the last four.
    """

    score: int
    embed: int
    train: int
    shared: tuple[str, ...] = ()
    gpus_per_replica: int = 1
    search_on_gpu: bool = False
    num_searchers: int | None = None  # side by side; None: one on each node
    num_builders: int | None = None  # of the GPUs in `embed`, those that build at once; None: all
    recompute: bool = False  # gradient checkpointing

    @property
    def replicas(self) -> int:
        return self.score // self.gpus_per_replica

    @property
    def builders(self) -> int:
        return self.num_builders or self.embed

    def searching(self, devices: Devices) -> int:
        """Return the GPUs or nodes that search in parallel; searchers of one node share its cores."""
        searchers = self.num_searchers or devices.nodes
        return searchers if self.search_on_gpu else min(searchers, devices.nodes)

    def shares(self, devices: Devices) -> bool:
        """Return whether roles have more GPUs together than there are."""
        return not self.shared and self.score + self.embed + self.train > devices.count

    def by_role(self) -> dict[str, float]:
        """Return the GPUs by role; a shared one counts in equal parts."""
        counts = {"score": self.score, "embed": self.embed, "train": self.train}
        return {role: n / len(self.shared) if role in self.shared else float(n) for role, n in counts.items()}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one GPU for each activity; `search` is of a batch on all that search."""

    pair: float
    score: float  # the pairs of a step
    units: int  # calls to replicas that the pairs of a step are divided into
    build: float  # the whole corpus
    train: float  # a step
    encode: float  # the queries of a batch
    search: float
    rank_0: float = 0.0  # of its interpreter, to have the pairs of a step scored

    def exchange(self, job: Job, devices: Devices, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of the gradients."""
        speed = RING_WITHIN if ranks <= devices.count / devices.nodes else RING_BETWEEN
        return 2 * GRADIENT_BYTES * job.trained.learning * (ranks - 1) / ranks / speed


def seconds_of(job: Job, devices: Devices, split: Split) -> Seconds:
    """Divide the work by the rates that the GPUs reach in the configuration's precisions."""
    config, shape, work = job.config, job.shape, job.work
    pair = work.pair / devices.rate(config.lm.dtype.value, "score")
    unit = tokens_per_unit(LMShape(job.lm.layers, job.lm.hidden), True, config.lm.tokens_per_batch)
    again = (RECOMPUTED if split.recompute else 1.0) * (CHUNKED if shape.chunk_tokens else 1.0)
    return Seconds(
        pair=pair,
        score=shape.pairs * pair,
        units=-(-shape.pairs // max(1, unit // shape.pair)),
        build=shape.num_documents * work.document / devices.rate(config.index.dtype.value, "embed"),
        train=again * work.train_step / devices.rate(config.train.precision.value, "train"),
        encode=work.encode_batch / devices.rate(config.train.precision.value, "embed"),
        search=search_seconds(job, devices, split),
        rank_0=RANK_0_STEP + RANK_0_PAIR * shape.pairs + RANK_0_REPLICA * split.replicas,
    )


def search_seconds(job: Job, devices: Devices, split: Split) -> float:
    """Return the seconds of searching a batch: the larger of the time of products and that of reading vectors.

    A GPU reads the vectors that each query probes; a CPU reads the vectors that any query probes once.
    """
    shape, index, parts, gpu = job.shape, job.index, split.searching(devices), devices.accelerator
    share = index.probed_share if split.search_on_gpu else min(1.0, shape.batch_size * index.probed_share)
    read = shape.num_documents * index.bytes_per_vector * share / parts
    if split.search_on_gpu:
        products = shape.batch_size * shape.num_documents * share / parts
        return max(PRODUCT * products, read / gpu.bandwidth)
    width = searched_width(job.config, job.retriever.dim)
    cores = core_seconds(index.kind, width, shape.num_documents, shape.batch_size, shape.k, parts) / HOST_CORES
    return max(cores, read / HOST_BANDWIDTH)


def core_seconds(kind: IndexKind, dim: int, num_documents: int, queries: int, k: int, parts: int = 1) -> float:
    """Return the seconds of one core to search one of `parts` of the vectors [num_documents, dim] for k each.

    A lossy kind finds lists, reads their codes for each query, and reranks candidates by stored vectors. A kind of
    unknown codes counts as an exact search of what it probes.
    """
    factory = kind.factory or ""
    lists = num_lists(factory)
    share = kind.nprobe / lists if lists else 1.0
    rate = next((rate for pattern, rate in CODE_RATES.items() if re.search(pattern, factory)), None)
    if rate is None or factory.startswith("HNSW"):
        return queries * num_documents / parts * share * 2 * dim / CORE_FLOP
    size = bytes_per_vector(factory, dim, num_documents)
    assert size is not None
    scanned = num_documents / parts * share * size / rate
    finding = 2 * dim * lists / CENTROID_FLOP * (GRAPH if "_HNSW" in factory else 1)
    ordering = k * kind.overretrieve * (CANDIDATE + dim * CANDIDATE_NUMBER) if kind.rerank else 0.0
    return queries * (finding + kind.nprobe * LIST + scanned + ordering)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A split and what comes of it: seconds of a step, and seconds that the trainer waits for late refreshes."""

    split: Split
    seconds: Seconds
    step: float
    waits: float
    hours: dict[str, float]  # GPU hours of a role's own work; of a search in host memory, hours of nodes
    stages: dict[str, float]  # hours of the stages, one after the other
    dominates: str

    @property
    def wall_hours(self) -> float:
        return sum(self.stages.values())


def estimate(job: Job, devices: Devices, split: Split, measured: Seconds | None = None) -> Estimate:
    """Estimate the run on a split: first index, training, last index, measurements of held-out texts.

    `measured` seconds stand in for those by the rates of the devices.
    """
    shape, seconds = job.shape, measured or seconds_of(job, devices, split)
    step, waits = (
        (pace_of_shared(job, devices, split, seconds), 0.0)
        if split.shares(devices)
        else pace_of_split(job, devices, split, seconds)
    )
    exchange, build = seconds.exchange(job, devices, split.train), seconds.build / split.builders
    development = shape.num_dev * (shape.refresh.num_starts + 2) * shape.heldout_k * seconds.pair
    work = {
        "score": shape.steps * seconds.score + development,
        "embed": shape.num_builds * seconds.build,
        "train": shape.steps * (seconds.train + split.train * exchange),
        "search": split.searching(devices) * shape.steps * seconds.search,
    }
    # Seconds at work of the GPUs of a role: no more replicas are busy than there are units in flight.
    elapsed = {
        "score": work["score"] / max(1, min(split.replicas, seconds.units * (shape.depth + 1))),
        "embed": shape.num_builds * build,
        "train": shape.steps * (seconds.train / split.train + exchange + seconds.encode),
        "search": shape.steps * seconds.search,
    }
    if split.shares(devices):
        elapsed = {**work, "search": math.inf if seconds.search >= step else 0.0}
    # Without a document, and with those of the retriever before and after.
    measuring = shape.heldout * (1 + 2 * shape.heldout_k) * seconds.pair / max(1, split.replicas)
    stages = {
        "first_index": build,
        "training": shape.steps * step + waits,
        "last_index": build,
        "measuring": measuring,
    }
    return Estimate(
        split,
        seconds,
        step,
        waits,
        {role: value / 3600 for role, value in work.items()},
        {stage: value / 3600 for stage, value in stages.items()},
        RANK_0 if seconds.rank_0 >= step else max(ROLES, key=lambda role: (elapsed[role], work[role])),
    )


def pace_of_split(job: Job, devices: Devices, split: Split, seconds: Seconds) -> tuple[float, float]:
    """Return the seconds of a step, and of waiting for late refreshes in the run, if roles have GPUs of their own.

    The slowest role sets the pace, or the latency of a batch's scores while `depth` batches are ahead.
    """
    shape, units = job.shape, seconds.units
    step = seconds.encode + seconds.train / split.train + seconds.exchange(job, devices, split.train)
    score, unit = seconds.score / split.replicas, seconds.score / units
    latency = (step + seconds.search - (-units // split.replicas) * unit) / (shape.depth + 1)
    together = step + score if {"score", "train"} <= set(split.shared) else 0.0
    pace = max(step, score, seconds.search, seconds.rank_0, latency, together)
    late = seconds.build / split.builders - (0 if split.shared else (shape.refresh.lag_steps or 0) * pace)
    return pace, shape.refresh.num_starts * max(0.0, late)


def pace_of_shared(job: Job, devices: Devices, split: Split, seconds: Seconds) -> float:
    """Return the seconds of a step if roles share GPUs: by total work, the chain of a step, and late refreshes."""
    ranks, score, index, count = split.train, split.score, split.embed, devices.count
    refresh = job.shape.refresh
    embed = refresh.num_starts * seconds.build / job.shape.steps
    searching = split.searching(devices) * seconds.search if split.search_on_gpu else 0.0
    train = seconds.train / ranks + seconds.exchange(job, devices, ranks)
    chain, others = seconds.encode + train, count - ranks  # what comes one after the other in a step
    if score <= others and index <= others:
        pace = max(chain, (seconds.score + embed + searching) / others)
    else:
        least = (seconds.score + embed + searching + seconds.encode + ranks * train) / count
        beside = [(seconds.score, score)] if score > others else []
        beside += [(embed + searching, index)] if index > others else []
        pace = _pace_beside(chain, least, beside)
    lag = 1.0 if refresh.lag_steps is None else refresh.lag_steps / refresh.every_steps
    late = max(0.0, embed / index - lag * pace / 2)
    return max(pace + late * (1 - index / count), seconds.search, seconds.rank_0)


def _pace_beside(chain: float, least: float, beside: list[tuple[float, int]]) -> float:
    """Return the seconds of a step whose chain shares a GPU with scorers or builders for part of the time.

    `beside` has the seconds of each such role in a step, and its GPUs. Bisection finds the fixed point.
    """
    low, high = least, max(least, (1 + 2 * BESIDE) * HEADROOM * chain)
    for _ in range(20):
        pace = (low + high) / 2
        busy = sum(min(1.0, 2 * work / (gpus * pace)) for work, gpus in beside)
        low, high = (pace, high) if HEADROOM * chain * (1 + BESIDE * busy) > pace else (low, pace)
    return high
