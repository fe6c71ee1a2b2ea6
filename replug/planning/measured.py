"""Rates from a run that was measured: what each activity took, and what it would take alone on its devices.

Roles of one machine slow each other down. So the measured run is simulated with the rates assumed, and the rates are
corrected until the simulation takes as long at each activity as the run did.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from replug.cluster.layout import scorers
from replug.config.errors import UserError
from replug.config.load import load_stored_config
from replug.config.schema import Config
from replug.data.manifest import read_mark, require_checksums
from replug.planning.accelerators import DeviceModel, Devices
from replug.planning.estimate import (
    Job,
    MeasuredSeconds,
    Rates,
    Split,
    durations_of,
    host_seconds,
    job_of,
    pairs_per_unit,
    scores_on_gpu,
    scoring_seconds,
)
from replug.planning.host_search import CORE_FLOP
from replug.planning.processors import configured_allocation, configured_split, on_cores
from replug.planning.simulate import Durations, SimulatedRun, simulate

MEASURED = "measured"
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "run_times.json")
ROUNDS = 6  # of correction; the third changes nothing visible
LEAST_SECONDS = 1e-9
WAITED = 0.1  # share of a step from which its wait tells when what it waited for was ready
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ObservedStages:
    """Seconds of what came once. `first_build` and `last_build` are with all that belongs to these stages.

    `warm_up` is what the first step took more than later ones, `outside` the training before its first step, which
    measures held-out texts too.
    """

    start_up: float
    first_build: float
    last_build: float
    measure: float
    warm_up: float
    outside: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Seconds that activities took in a run, its other roles at work beside them.

    `pair` is of a replica's time, without what a stand-in sleeps in each call.
    """

    encode: float
    search: float
    pair: float
    train: float
    build: float
    checkpoint: float
    stages: ObservedStages


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run directory's configuration, cores, metrics by step, and times of its stages."""

    path: Path
    config: Config
    cores: int
    rows: list[Row]
    times: dict[str, float]


def read_run(path: Path) -> MeasuredRun:
    """Raises UserError for what is missing, or is not what the run wrote, with its name."""
    for name in FILES:
        if not (path / name).is_file():
            raise UserError(f"--measured: {path / name} is missing; expected the directory of a finished run")
    require_checksums(path, "--measured takes a run as it ended: bring the file back, or measure another run", FILES)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    if [row.get("step") for row in rows] != list(range(len(rows))):
        raise UserError(f"--measured: {path / 'metrics.jsonl'} lacks steps; expected one row for each")
    cores = json.loads((path / "environment.json").read_text()).get("cores")
    if not isinstance(cores, int):
        raise UserError(f"--measured: {path / 'environment.json'} has no number of cores; expected `cores`")
    times = json.loads((path / "run_times.json").read_text())
    return MeasuredRun(path, on_cores(load_stored_config(path / "config.yaml")).config, cores, rows, times)


def observe(run: MeasuredRun, job: Job) -> Observed:
    """Raises UserError for a metric or time that is not there, or a run too short to tell.

    The first step is left out: it warms up, and encodes as many batches as are to be in flight.
    """
    depth, later = run.config.train.pipeline_depth, run.rows[1:]
    if len(later) <= depth:
        raise UserError(
            f"--measured: {run.path} has {len(run.rows)} steps; expected more than train.pipeline_depth + 1"
        )
    train = fmean(_values(run, later, "time/train_seconds"))
    pair, first = _seconds_per_pair(run, job), _time(run, "first_index")
    build = _build_seconds(run, job, heldout_seconds(job, pair, scorers(run.config.lm)[0]))
    return Observed(
        encode=sum(_values(run, later, "time/retrieve_seconds")) / (len(later) - depth),
        search=sum(_values(run, later, "time/search_seconds")) / (len(later) - depth),
        pair=pair,
        train=train,
        build=first if build is None else build,
        checkpoint=_mean_of_positive(_values(run, later, "time/checkpoint_seconds")),
        stages=ObservedStages(
            start_up=_time(run, "start_up"),
            first_build=first,
            last_build=_time(run, "last_index"),
            measure=_time(run, "measuring"),
            warm_up=max(0.0, _values(run, run.rows[:1], "time/train_seconds")[0] - train),
            outside=_time(run, "training") - sum(_values(run, run.rows, "time/step_seconds")),
        ),
    )


def calibrate(run: MeasuredRun, job: Job) -> Rates:
    """Rates of one actor of each role, alone on its threads."""
    observed, devices, split = observe(run, job), devices_of(run), configured_split(run.config)
    rates = _rates(job, devices, split, observed)
    allocation = configured_allocation(job, run.cores)
    corrected = observed
    for _ in range(ROUNDS):
        durations = durations_of(job, rates, devices, split)
        corrected = _correct(job, corrected, observed, durations, simulate(job.shape, durations, allocation))
        rates = _rates(job, devices, split, corrected)
    return rates


def job_of_run(run: MeasuredRun, lm_parameters: float | None, retriever_parameters: float | None) -> Job:
    manifest = run.path / "data" / "manifest.json"
    counted = read_mark(manifest)["counts"]["documents"] if manifest.is_file() else None
    return job_of(run.config, lm_parameters, retriever_parameters, counted)


def devices_of(run: MeasuredRun, count: int = 1) -> Devices:
    """So many machines as the one the run was on."""
    return Devices(DeviceModel(MEASURED, 0, 0, 0, 0, 0), count, 1)


def heldout_seconds(job: Job, pair_seconds: float, replicas: int) -> float:
    """What a refresh's held-out texts take the replicas, when they have nothing else to do."""
    call = job.seconds_per_call + job.shape.heldout.k * pair_seconds
    return job.shape.heldout.refresh_windows * call / replicas


def _rates(job: Job, devices: Devices, split: Split, seconds: Observed) -> Rates:
    shape, work, stages = job.shape, job.work, seconds.stages
    heldout = heldout_seconds(job, seconds.pair, split.replicas)
    return Rates(
        score=work.pair / max(LEAST_SECONDS, seconds.pair),
        embed=shape.num_documents * work.document / (split.embed * max(LEAST_SECONDS, seconds.build)),
        train=work.train_step / (split.train * max(LEAST_SECONDS, seconds.train)),
        encode=work.encode_batch / max(LEAST_SECONDS, seconds.encode),
        search=CORE_FLOP * host_seconds(job, job.index.kind) / max(LEAST_SECONDS, seconds.search),
        once=MeasuredSeconds(
            checkpoint=seconds.checkpoint,
            start_up=stages.start_up + stages.warm_up + max(0.0, stages.outside - heldout),
            first_build=stages.first_build - seconds.build,
            last_build=stages.last_build - seconds.build,
            measure_window=stages.measure * split.replicas / max(1, shape.heldout.windows),
        ),
    )


def _correct(
    job: Job, assumed: Observed, observed: Observed, durations: Durations, simulated: SimulatedRun
) -> Observed:
    """Each activity's seconds, by as much as the simulation had them too long or too short."""
    steps, built = len(simulated.step_ends), _built(job, simulated)
    trained = simulated.busy("train") / (steps * (durations.train + durations.encode))
    scored = simulated.busy("score") / scoring_seconds(job.shape, durations)
    return replace(
        assumed,
        train=observed.train / trained,
        encode=observed.encode / trained,
        pair=observed.pair / scored,
        build=observed.build * (durations.build / fmean(built) if built else 1.0),
    )


def _values(run: MeasuredRun, rows: Sequence[Row], key: str) -> list[float]:
    for row in rows:
        if key not in row:
            raise UserError(
                f"--measured: {run.path / 'metrics.jsonl'} has no {key} at step {row['step']}; expected a run of this "
                "version with local LM weights"
            )
    return [float(row[key]) for row in rows]


def _time(run: MeasuredRun, name: str) -> float:
    if name not in run.times:
        raise UserError(
            f"--measured: {run.path / 'run_times.json'} has no {name}; expected a finished run of this version"
        )
    return float(run.times[name])


def _mean_of_positive(values: list[float]) -> float:
    found = [value for value in values if value > 0]
    return fmean(found) if found else 0.0


def _seconds_per_pair(run: MeasuredRun, job: Job) -> float:
    """Of a replica's time, over the pairs that were scored and not read from the cache, less what a stand-in slept.

    The first row is left out with the batches that were answered in it.
    """
    later, misses = run.rows[1:], _values(run, run.rows, "scoring/misses")
    if misses[-1] <= misses[0]:
        raise UserError(
            f"--measured: {run.path} scored nothing after its first step; expected a run with an empty cache"
        )
    tokens = zip(
        _values(run, later, "scoring/tokens_per_second"), _values(run, later, "time/step_seconds"), strict=True
    )
    busy = [rate * seconds / _busy_rate(run, row) for (rate, seconds), row in zip(tokens, later, strict=True) if rate]
    waiting = _batches_in_flight(run, job)
    pairs = misses[-1] - misses[0] + waiting * job.shape.step.pairs
    return max(0.0, sum(busy) - job.seconds_per_call * _calls(run, job, waiting)) / pairs


def _batches_in_flight(run: MeasuredRun, job: Job) -> int:
    """When the first row ended: those from the first on that a later step waited for."""
    ahead = run.rows[1 : job.shape.step.depth + 1]
    times = zip(_values(run, ahead, "time/wait_scores_seconds"), _values(run, ahead, "time/step_seconds"), strict=True)
    late = [number for number, (waited, whole) in enumerate(times) if waited > WAITED * whole]
    return job.shape.step.depth - late[0] if late else 0


def _calls(run: MeasuredRun, job: Job, waiting: int) -> int:
    """To replicas, after the first row: units of batches, and held-out texts of the refreshes adopted."""
    units = -(-job.shape.step.pairs // pairs_per_unit(job, scores_on_gpu(job, devices_of(run))))
    refreshes = sum(swapped > 0 for swapped in _values(run, run.rows[1:], "index/swapped"))
    return (len(run.rows) - 1 - job.shape.step.depth + waiting) * units + refreshes * job.shape.heldout.refresh_windows


def _built(job: Job, simulated: SimulatedRun) -> list[float]:
    """Seconds of the simulated refreshes' embedding, which share the processor with training."""
    spans = simulated.spans["embed"][1:-1]
    return [span.end - span.begin for span in spans[: job.shape.num_refreshes]]


def _busy_rate(run: MeasuredRun, row: Row) -> float:
    """Tokens a second of a busy replica. Not from `busy_share`, which is cut at 1 where an answer took many steps."""
    keys = [f"scoring/replica_{number}/tokens_per_second" for number in range(scorers(run.config.lm)[0])]
    return fmean(value for key in keys for value in _values(run, [row], key) if value)


def _build_seconds(run: MeasuredRun, job: Job, heldout: float) -> float | None:
    """Mean over the refreshes that were adopted, until their vectors could be searched; None where there was none.

    The embedding's own time, and that of loading and comparing the index: it is seen where the trainer waited for it,
    and held-out texts were measured for `heldout` seconds.
    """
    builds, waits = (
        _values(run, run.rows, "index/swap_build_seconds"),
        _values(run, run.rows, "time/wait_index_seconds"),
    )
    steps, lag = _values(run, run.rows, "time/step_seconds"), job.shape.refresh.fixed_lag
    adopted = [step for step, swapped in enumerate(_values(run, run.rows, "index/swapped")) if swapped]
    waited = [step for step in adopted if lag is not None and step >= lag and waits[step] > WAITED * steps[step]]
    rest = [sum(steps[step - (lag or 0) : step]) + waits[step] - builds[step] - heldout for step in waited]
    if not adopted:
        return None
    return fmean(builds[step] for step in adopted) + (max(0.0, fmean(rest)) if rest else 0.0)
