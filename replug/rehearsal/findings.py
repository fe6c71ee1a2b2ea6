"""What a rehearsal shows: each thing that was looked at, what was found, what there is of it. Pure.

Counts of files are the run's or are brought up to them here. A misfit says which key or limit to change.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replug.cluster.interruption import EXIT_STATUS
from replug.cluster.layout import Layout
from replug.cluster.packing import BUILDER, SCORER, SEARCHER, TRAINER, Actor
from replug.config.choices import SwapMode
from replug.config.refresh_policy import Adopt
from replug.config.schema import Config
from replug.rehearsal.fake_cluster import FakeActor
from replug.rehearsal.run import Rehearsed
from replug.rehearsal.scaling import counts_of
from replug.rehearsal.watching import Most

CLASSES = {TRAINER: "TrainerRank", SEARCHER: "Searcher", BUILDER: "Builder", SCORER: "Scorer"}
BLOCKED_SHARE = 0.01  # of the planned hours that rank 0 may spend on triggers and checkpoints
LEAST_BLOCKED_SECONDS = 1.0  # a rehearsal shares the machine with its actors: less may be their doing
Roles = tuple[str, ...]  # of the actors on one GPU, sorted


@dataclass(frozen=True, slots=True)
class Room:
    """What the machines have that no plan knows: GB of disk under the run directory, and of a node's memory."""

    disk_gb: float
    host_gb: float


@dataclass(frozen=True, slots=True)
class Needed:
    """What the plan says of the whole run."""

    disk_gb: float
    host_gb: float  # of a node, for vectors that are searched there
    hours: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `mend` is said where it does not fit."""

    what: str
    found: str
    limit: str
    fits: bool
    mend: str = ""


def findings(layout: Layout, rehearsed: Rehearsed, needed: Needed, room: Room) -> list[Finding]:
    """In the order in which a run meets them."""
    return [
        *_memory(layout, needed, room),
        _disk(needed, room),
        *_places(layout, rehearsed),
        _ending(rehearsed),
        *_counts(layout.config, rehearsed),
        *_limits(rehearsed),
        *_blocking(layout.config, rehearsed, needed.hours),
    ]


def _memory(layout: Layout, needed: Needed, room: Room) -> Iterator[Finding]:
    """By the kinds of GPUs: those with the same actors take the same."""
    for gpu in {_roles(gpu.actors): gpu for gpu in layout.gpus if gpu.actors}.values():
        keys = " + ".join(dict.fromkeys(actor.key for actor in gpu.actors))
        limit = gpu.node.gpu_limit / 1e9
        yield Finding(
            f"memory of a GPU with {gpu.describe()}",
            f"{gpu.num_bytes / 1e9:.1f} GB",
            f"{limit:.1f} GB",
            gpu.num_bytes / 1e9 <= limit,
            f"more GPUs for {keys}",
        )
    if needed.host_gb:
        yield Finding(
            "memory of a node for searches",
            f"{needed.host_gb:.1f} GB",
            f"{room.host_gb:.1f} GB",
            needed.host_gb <= room.host_gb,
            "more nodes, index.num_shards, or index.kind=ivf_pq; --host-memory says what the nodes have",
        )


def _disk(needed: Needed, room: Room) -> Finding:
    return Finding(
        "disk under run_dir",
        f"{needed.disk_gb:.0f} GB",
        f"{room.disk_gb:.0f} GB free",
        needed.disk_gb <= room.disk_gb,
        "run_dir on a larger disk, or a smaller checkpoint.keep_last; --disk says what there is",
    )


def _places(layout: Layout, rehearsed: Rehearsed) -> Iterator[Finding]:
    late = rehearsed.watch.never_up()
    missing = Counter(actor.role for actor in late)
    missing[CLASSES[SCORER]] -= layout.num_waiting
    names = [f"{count} {role}" for role, count in sorted(missing.items()) if count > 0]
    yield Finding(
        "actors that found no place", ", ".join(names) or "none", "none", not names, "fewer of them, or more nodes"
    )
    planned, found = _planned_gpus(layout, scorers_left_out(layout, rehearsed)), _found_gpus(rehearsed.watch.fullest)
    wrong = _wrong_gpus(layout.config, planned, found)
    yield Finding(
        "GPUs with the actors that are planned",
        f"{found.total() - wrong.total()} of {planned.total()}",
        "all",
        not wrong and found.total() == planned.total(),
        f"found besides: {'; '.join(' + '.join(roles) for roles in wrong) or 'none'} (resources)",
    )


def scorers_left_out(layout: Layout, rehearsed: Rehearsed) -> int:
    """Those beyond as many as are rehearsed."""
    if layout.config.lm.path is None:
        return 0
    return (layout.config.lm.num_replicas or 1) - (rehearsed.config.lm.num_replicas or 1)


def _planned_gpus(layout: Layout, left_out: int) -> "Counter[Roles]":
    """Rank 0 is no actor; the last scorers may be left out."""
    kept = sum(actor.key == SCORER for actor in layout.actors) - left_out

    def is_there(actor: Actor) -> bool:
        return actor.number < kept if actor.key == SCORER else (actor.key, actor.number) != (TRAINER, 0)

    there = (_roles([actor for actor in gpu.actors if is_there(actor)]) for gpu in layout.gpus)
    return Counter(roles for roles in there if roles)


def _roles(actors: Sequence[Actor]) -> Roles:
    return tuple(sorted(CLASSES[one.key] for one in actors))


def _found_gpus(actors: Sequence[FakeActor]) -> "Counter[Roles]":
    by_gpu: dict[tuple[str, int], list[str]] = {}
    for actor in actors:
        for gpu in actor.gpus:
            by_gpu.setdefault((actor.node, gpu), []).append(actor.role)
    return Counter(tuple(sorted(roles)) for roles in by_gpu.values())


def _wrong_gpus(config: Config, planned: "Counter[Roles]", found: "Counter[Roles]") -> "Counter[Roles]":
    """Searchers of two versions and builders change places at a swap of blue_green, so there their mixture is right."""
    if config.index.swap is SwapMode.blue_green:
        index = {CLASSES[SEARCHER], CLASSES[BUILDER]}
        return Counter({roles: n for roles, n in found.items() if roles not in planned and not set(roles) <= index})
    return found - planned


def _ending(rehearsed: Rehearsed) -> Finding:
    said = {(EXIT_STATUS, 0): "resumed and ended", (0,): "ended before it was interrupted"}
    last = rehearsed.output.strip().splitlines()[-1:] or [""]
    statuses = tuple(rehearsed.statuses)
    return Finding(
        "the run, interrupted once",
        said.get(statuses, f"exit status {statuses[-1]}"),
        "ends",
        statuses in said,
        last[0],
    )


def _counts(config: Config, rehearsed: Rehearsed) -> Iterator[Finding]:
    """What happened as often as in the run."""
    wanted, metrics = counts_of(config), rehearsed.metrics
    last = metrics[-1] if metrics else {}
    swaps = int(last.get("index/live_version", 0))
    failed = int(last.get("index/refreshes_failed", 0))
    all_came = not failed and (swaps == wanted.refreshes or config.refresh.adopt is Adopt.when_ready)
    yield Finding("index refreshes", str(swaps), str(wanted.refreshes), all_came, "refresh.every_steps")
    checkpoints = sum(row["time/checkpoint_seconds"] > 0 for row in metrics)
    # Its seconds are in the line after its step: the last has none, nor one that the interruption follows.
    all_there = checkpoints >= wanted.checkpoints - 2
    yield Finding("checkpoints", str(checkpoints), str(wanted.checkpoints), all_there, "checkpoint.every_steps")
    versions, most = rehearsed.watch.most_versions, wanted.most_versions + 1  # one that is being removed
    yield Finding("index versions on disk", str(versions), str(most), versions <= most, "checkpoint.keep_last")


def _limits(rehearsed: Rehearsed) -> Iterator[Finding]:
    """Of the processes that hold most; files of the index are as many as in the run."""
    grown = rehearsed.files.vector_files / rehearsed.scaled_files.vector_files
    for role, most in sorted(rehearsed.watch.most.items()):
        for what, found, limit, name in _held(most, grown):
            yield Finding(f"{what} of {role}", f"{found:,}", f"{limit:,}", found < limit, name)


def _held(most: Most, grown: float) -> Iterator[tuple[str, int, int, str]]:
    yield "open files", _of_run(most.descriptors.descriptors, grown), most.limits.descriptors, "ulimit -n"
    yield "mappings", _of_run(most.mappings.mappings, grown), most.limits.mappings, "sysctl vm.max_map_count"


def _of_run(held: "Counter[str]", grown: float) -> int:
    return round(held["other"] + held["corpus"] + held["index"] * grown)


def _blocking(config: Config, rehearsed: Rehearsed, hours: float) -> Iterator[Finding]:
    """What rank 0 does itself, beside writing the bytes of weights: snapshots and queues, marks and removals."""
    counts, metrics = counts_of(config), rehearsed.metrics
    most = max(LEAST_BLOCKED_SECONDS, BLOCKED_SHARE * hours * 3600)
    for cause, name, key, count in (
        ("refresh", "starting refreshes", "refresh.every_steps", counts.refreshes),
        ("checkpoint", "checkpoints", "checkpoint.every_steps", counts.checkpoints),
    ):
        seconds = [row[f"time/{cause}_seconds"] for row in metrics if row[f"time/{cause}_seconds"]]
        found = _mean(seconds) * count
        yield Finding(
            f"rank 0 is busy with {name}", f"{found:.1f} s", f"{most:.0f} s", found <= most, f"a larger {key}"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
