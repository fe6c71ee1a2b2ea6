"""From work and rates to hours, memory and a simulated run, for one split of the devices.

Rates come from an accelerator's peak and the efficiency assumed, or from a run that was measured (`measured.py`).
"""

from dataclasses import dataclass, field

from replug.cluster.gpu_shares import Sizes
from replug.config.choices import SwapMode
from replug.config.schema import Config
from replug.index_workers.file_size import rows_per_file
from replug.index_workers.kinds import IndexKind
from replug.models.batching import LMShape, tokens_per_pass, tokens_per_unit
from replug.planning import memory
from replug.planning.accelerators import DeviceModel, Devices
from replug.planning.host_search import CORE_FLOP, core_seconds
from replug.planning.model_sizes import ModelSize, lm_size, retriever_size, stand_in_seconds
from replug.planning.shared_gpus import simulate_shared
from replug.planning.simulate import (
    ROLES,
    DeviceAllocation,
    Durations,
    Place,
    ScoringSeconds,
    SharedGPUs,
    SimulatedRun,
    StageSeconds,
    simulate,
)
from replug.planning.sizes import TOKENS_PER_PASS_GPU, sizes_of
from replug.planning.trained import GRADIENT_BYTES, trained_part
from replug.planning.training_memory import train_bytes
from replug.planning.workload import IndexSize, Shape, Workload, index_size, searched_width, shape_of, work_of

# Where searches run when the vectors do not fit the index GPUs: one node's processors and memory.
HOST_CORES, HOST_BANDWIDTH = 64, 1e11
# Bytes a second in which ranks exchange gradients: within a node (NVLink), and between nodes (100 Gbit).
RING_WITHIN, RING_BETWEEN = 1e11, 1e10
RECOMPUTED = 4 / 3
EMBED_TOKENS_PER_PASS = 2048  # of a builder on a CPU (models/encoder.py)


@dataclass(frozen=True, slots=True)
class MeasuredSeconds:
    """What a measured run tells beyond rates; without one nothing is known of it.

    `first_build` and `last_build` are what those builds take beyond the embedding, `measure_window` one text of the
    measurements on one replica (None: as in training).
    """

    checkpoint: float = 0.0
    start_up: float = 0.0
    first_build: float = 0.0
    last_build: float = 0.0
    measure_window: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP a second of one device at each activity. `search_bandwidth` is bytes a second (0: not looked at).

    `search` is of exact products, also where the kind is a lossy one.
    """

    score: float
    embed: float
    train: float
    encode: float
    search: float
    search_bandwidth: float = 0.0
    search_on_gpu: bool = False
    once: MeasuredSeconds = MeasuredSeconds()


@dataclass(frozen=True, slots=True)
class Job:
    """All that does not depend on the split."""

    config: Config
    shape: Shape
    retriever: ModelSize
    lm: ModelSize
    index: IndexSize
    work: Workload
    seconds_per_call: float = 0.0  # that a stand-in LM sleeps


@dataclass(frozen=True, slots=True)
class Split:
    """Devices by role. Roles in `shared` are on the same one and take turns; searches are where the index is.

    `gpus_per_replica` of the devices in `score` hold one LM together. Where searches are is the layout's to say, and
    where roles have more GPUs than there are, so is who is on which: `placed`.
    """

    score: int
    embed: int
    train: int
    shared: tuple[str, ...] = ()
    gpus_per_replica: int = 1
    search_on_gpu: bool = False
    num_searchers: int | None = None  # side by side; None: one on each node
    num_builders: int | None = None  # of the GPUs in `embed`, those that build at once; None: all
    recompute: bool = False  # gradient checkpointing: a third more work for much less memory
    placed: SharedGPUs | None = None

    @property
    def replicas(self) -> int:
        return self.score // self.gpus_per_replica

    def by_role(self) -> dict[str, float]:
        """GPUs by role, one that is shared in equal parts; of several that are shared, those that a role is on."""
        counts = {"score": self.score, "embed": self.embed, "train": self.train}
        return {role: n / len(self.shared) if role in self.shared else float(n) for role, n in counts.items()}


@dataclass(frozen=True, slots=True)
class Estimate:
    """One split, what it takes and what comes of it."""

    split: Split
    allocation: DeviceAllocation
    durations: Durations
    simulated: SimulatedRun
    hours: dict[str, float] = field(default_factory=dict)


def job_of(
    config: Config,
    lm_parameters: float | None = None,
    retriever_parameters: float | None = None,
    num_documents: int | None = None,
) -> Job:
    """Raises UserError for models of unknown size and a corpus of unknown length."""
    shape = shape_of(config, num_documents)
    retriever = retriever_size(config.retriever, retriever_parameters)
    lm_name = str(config.lm.path or config.lm.model)
    lm = lm_size(lm_name, lm_parameters)
    searched = searched_width(config, retriever.dim)
    index = index_size(config, searched, shape.num_documents)
    work = work_of(shape, retriever, lm, index.probed_share, searched, trained_part(config, retriever))
    return Job(config, shape, retriever, lm, index, work, stand_in_seconds(lm_name))


def rates_of(devices: Devices, config: Config, efficiency: float | None = None, search_on_gpu: bool = False) -> Rates:
    """What one device does at the efficiency assumed, in the precisions of the configuration."""
    accelerator, share = devices.accelerator, efficiency or devices.accelerator.efficiency

    def rate(dtype: str) -> float:
        return share * accelerator.peak(accelerator.resolve_dtype(dtype))

    on_device = search_on_gpu or accelerator.is_cpu
    return Rates(
        score=rate(config.lm.dtype.value),
        embed=rate(config.index.dtype.value),
        train=rate(config.train.precision.value),
        encode=rate(config.train.query_precision.value),
        search=rate("float32" if accelerator.is_cpu else "float16") if on_device else HOST_CORES * CORE_FLOP,
        search_bandwidth=accelerator.bandwidth if on_device else HOST_BANDWIDTH,
        search_on_gpu=search_on_gpu,
    )


def pairs_per_unit(job: Job, is_gpu: bool) -> int:
    """Pairs of one call to a replica, which one replica scores (models/scorer_pool.py)."""
    shape = LMShape(job.lm.layers, job.lm.hidden)
    return max(1, tokens_per_unit(shape, is_gpu, job.config.lm.tokens_per_batch) // job.shape.lengths.pair)


def scores_on_gpu(job: Job, devices: Devices) -> bool:
    return not devices.accelerator.is_cpu or bool(job.config.lm.gpus_per_replica)


def durations_of(job: Job, rates: Rates, devices: Devices, split: Split) -> Durations:
    """Seconds of each activity on the devices that the split gives it."""
    shape, work = job.shape, job.work
    units = -(-shape.step.pairs // pairs_per_unit(job, scores_on_gpu(job, devices)))
    pair, asleep = work.pair / rates.score, job.seconds_per_call
    build = shape.num_documents * work.document / (rates.embed * (split.num_builders or split.embed))
    return Durations(
        encode=work.encode_batch / rates.encode,
        search=search_seconds(job, rates, searching(split, devices)),
        scoring=ScoringSeconds(
            unit=asleep + shape.step.pairs * pair / units, units=units, window=asleep + shape.heldout.k * pair
        ),
        train=train_seconds(job, rates, devices, split),
        build=build,
        stages=StageSeconds(
            first_build=build + rates.once.first_build,
            last_build=build + rates.once.last_build,
            start_up=rates.once.start_up,
            measure=measure_seconds(job, rates, split.replicas),
        ),
        checkpoint=rates.once.checkpoint,
        files=-(-shape.num_documents // rows_per_file(shape.num_documents, job.config.index.block_documents)),
    )


def train_seconds(job: Job, rates: Rates, devices: Devices, split: Split) -> float:
    """Forward, backward, the forward once more where activations are recomputed, and the exchange of gradients."""
    again = split.recompute + (job.shape.step.chunk_tokens is not None)
    computing = job.work.train_step * (1 + again * (RECOMPUTED - 1)) / (rates.train * split.train)
    return computing + exchange_seconds(trained_part(job.config, job.retriever).learning, devices, split.train)


def searching(split: Split, devices: Devices) -> int:
    """GPUs, or nodes, that search side by side: searchers of one node share its cores."""
    searchers = split.num_searchers or devices.nodes
    return searchers if split.search_on_gpu else min(searchers, devices.nodes)


def search_seconds(job: Job, rates: Rates, parts: int) -> float:
    """Of a batch of queries over `parts` of the index side by side: computing, or the reading of the vectors.

    A processor computes as long as one core was measured to, by the cores there are (`host_search.py`). It reads what
    any of the queries looks into once.
    """
    queries, index = job.shape.step.batch_size, job.index
    share = index.probed_share if rates.search_on_gpu else min(1.0, queries * index.probed_share)
    read = job.shape.num_documents * index.bytes_per_vector * share
    reading = read / rates.search_bandwidth if rates.search_bandwidth else 0.0
    return max(search_flop(job, rates, parts) / rates.search, reading / parts)


def search_flop(job: Job, rates: Rates, parts: int) -> float:
    """Of a batch in one of the parts; on a processor, of the exact products that it would compute meanwhile."""
    if rates.search_on_gpu:
        return job.work.search_batch / parts
    return CORE_FLOP * host_seconds(job, job.index.kind, parts)


def host_seconds(job: Job, kind: IndexKind, parts: int = 1) -> float:
    """Seconds of one core for a batch of queries in one of the parts."""
    width, step = searched_width(job.config, job.retriever.dim), job.shape.step
    return core_seconds(kind, width, job.shape.num_documents, step.batch_size, step.k, parts)


def exchange_seconds(learning: int, devices: Devices, ranks: int) -> float:
    """Gradients summed over ranks in a ring: each sends and receives twice its share of the others'."""
    per_node = devices.count // devices.nodes
    speed = RING_WITHIN if ranks <= per_node else RING_BETWEEN
    return 2 * GRADIENT_BYTES * learning * (ranks - 1) / ranks / speed


def measure_seconds(job: Job, rates: Rates, replicas: int) -> float:
    """Bits per byte of all methods after training, a call to a replica for each text."""
    call = job.seconds_per_call + job.shape.heldout.pairs_per_window * job.work.pair / rates.score
    return (
        job.shape.heldout.windows
        * (call if rates.once.measure_window is None else rates.once.measure_window)
        / replicas
    )


def estimate(
    job: Job, rates: Rates, devices: Devices, split: Split, allocation: DeviceAllocation | None = None
) -> Estimate:
    """Simulate the run. `allocation` says who shares what where the split does not."""
    durations = durations_of(job, rates, devices, split)
    allocation = allocation or allocation_of(split)
    if split.placed is not None:
        simulated = simulate_shared(job.shape, durations, split.placed)
    else:
        simulated = simulate(job.shape, durations, allocation)
    return Estimate(split, allocation, durations, simulated, role_hours(job, durations, split, devices))


def allocation_of(split: Split) -> DeviceAllocation:
    """Roles that share one GPU have as much of it as each other while they work."""
    if split.placed is not None:
        return DeviceAllocation(len(split.placed.score), shared=split.placed)
    counts = {"score": split.replicas, "embed": 1, "train": 1, "search": 1}
    shared = [*split.shared, *(["search"] if "embed" in split.shared and split.search_on_gpu else [])]
    places = {role: Place("gpu", 1.0 / counts[role]) for role in shared}
    return DeviceAllocation(max(1, split.replicas), {"gpu": 1.0} if shared else {}, places)


def role_hours(job: Job, durations: Durations, split: Split, devices: Devices) -> dict[str, float]:
    """Device hours of each role's work in training and indexing; of `search`, hours of its GPUs, or of nodes."""
    shape = job.shape
    seconds = {
        "score": scoring_seconds(shape, durations),
        "embed": (split.num_builders or split.embed)
        * (durations.stages.first_build + durations.stages.last_build + shape.num_refreshes * durations.build),
        "train": split.train * shape.steps * durations.train,
        "search": searching(split, devices) * shape.steps * durations.search,
    }
    return {role: seconds[role] / 3600 for role in ROLES}


def scoring_seconds(shape: Shape, durations: Durations) -> float:
    """Of replicas together: the batches of training, and held-out texts before it and at each refresh."""
    heldout = shape.heldout.refresh_windows * (shape.num_refreshes + 1) * durations.scoring.window
    return shape.steps * durations.scoring.units * durations.scoring.unit + heldout


def elapsed_hours(job: Job, estimate: Estimate) -> dict[str, float]:
    """Hours that each role's work takes on its devices, were there nothing else: the longest bounds the run.

    The trainer also encodes the queries. A batch has so many units, and no more replicas than those in flight are busy.
    """
    shape, durations, split = job.shape, estimate.durations, estimate.split
    useful = min(split.replicas, durations.scoring.units * (shape.step.depth + 1))
    seconds = {
        "score": scoring_seconds(shape, durations) / useful,
        "embed": durations.stages.first_build + durations.stages.last_build + shape.num_refreshes * durations.build,
        "train": shape.steps * (durations.train + durations.encode),
        "search": shape.steps * durations.search,
    }
    return {role: seconds[role] / 3600 for role in ROLES}


def dominating(job: Job, found: Estimate) -> str:
    """The role whose devices are at work for longest: what the trainer waits for, or itself.

    Where roles share GPUs, of those on the busiest the one with most work. A search that is hidden behind them, however
    long, is then none of them.
    """
    hours = hours_at_work(job, found)
    return max(ROLES, key=lambda role: (hours[role], found.hours[role]))


def hours_at_work(job: Job, found: Estimate) -> dict[str, float]:
    """Of a role's devices; the longest bound the run."""
    return elapsed_hours(job, found) if found.allocation.shared is None else _hours_at_work(found)


def _hours_at_work(found: Estimate) -> dict[str, float]:
    """Of the devices of a role and of those that share them."""
    together = {role: sorted(found.allocation.sharing(role)) for role in ROLES}
    return {
        role: sum(found.simulated.busy(one) for one in roles) / found.allocation.devices(role) / 3600
        for role, roles in together.items()
    }


def memory_of(job: Job, accelerator: DeviceModel, split: Split) -> memory.RoleMemory:
    """GB of one device of each role; of `search`, all vectors together."""
    config, precision = job.config, accelerator.resolve_dtype
    on_cpu = accelerator.is_cpu
    passes = tokens_per_pass(LMShape(job.lm.layers, job.lm.hidden), not on_cpu, config.lm.tokens_per_batch)
    embedded = config.index.tokens_per_batch or (EMBED_TOKENS_PER_PASS if on_cpu else TOKENS_PER_PASS_GPU)
    trained = (job.retriever, job.shape, split.train, precision(config.train.precision.value))
    part = trained_part(config, job.retriever)
    parts = (
        memory.score_bytes(job.lm, passes, precision(config.lm.dtype.value)) / split.gpus_per_replica,
        memory.embed_bytes(job.retriever, embedded, precision(config.index.dtype.value)),
        train_bytes(*trained, checkpointed=False, trained=part),
        train_bytes(*trained, checkpointed=True, trained=part),
        memory.search_bytes(job.shape.num_documents, job.index.bytes_per_vector, config.index.swap is SwapMode.double),
    )
    return memory.RoleMemory(*(part / 1e9 for part in parts))


def sizes_on(job: Job, accelerator: DeviceModel, config: Config) -> Sizes:
    """What the layout is to know of the job's models, by a configuration that may recompute activations."""
    lm = job.lm if config.lm.path else None
    return sizes_of(config, job.retriever, lm, job.shape.num_documents, accelerator.resolve_dtype)
