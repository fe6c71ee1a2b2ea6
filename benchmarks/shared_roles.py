"""Roles that share GPUs beside the best split of them: the same losses, the wall time, and what the plan foretells.

    python -m benchmarks.shared_roles             about five minutes of two quiet cores
    python -m benchmarks.shared_roles --steps 24  shorter

Four fake GPUs of this machine's Ray (`replug.rehearsal.fake_cluster`), each a slow device of its own that its processes
take turns on (`benchmarks.paced_devices`). Real: MiniLM that embeds and trains, texts, exact search, refreshes, every
process, scheduler and layout of `replug train`, and the turns. Stand-in: the LM, whose scores are real numbers of a
cache model over words; and the time of a piece, which follows from its tokens, documents or steps, is longer than what
it computes, and is slept for the rest. One rank trains in both, so that losses can be equal to the last bit.

The split is the best one by the plan, shared roles too. Both are simulated as `replug plan` does, with the seconds of a
unit, a file and a step that the run of the split measured, where each role is alone on its devices. Wall time is from
the first step to the end of the last one: without start-up, first and last index.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from benchmarks.machine import describe_machine
from benchmarks.paced_devices import Pace, Piece, take_pieces
from replug.cluster.environment import configure_ray_environment
from replug.config.load import load_config
from replug.config.schema import Config
from replug.planning.accelerators import Devices, accelerator_named
from replug.planning.estimate import Job, Split, allocation_of, job_of
from replug.planning.shared_gpus import simulate_shared
from replug.planning.simulate import Durations, ScoringSeconds, SimulatedRun, StageSeconds, simulate
from replug.planning.split import fitting_splits, settings_of
from replug.rehearsal.fake_cluster import fake_cluster
from replug.train.figures import totals
from replug.train.run_dir import RunDirectory

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/debug.yaml"
GPUS, MEMORY_GB = 4, 80.0
ASKED_RATIO, ASKED_ERROR = 1.2, 0.15
LATE = 0.02  # of the pieces: above it the machine had too little time for the run to say something

# Device seconds of a step: 4.8 of scoring, 0.8 of the trainer, 3.0 of embedding (24 of each refresh, every 8 steps).
# Two GPUs that score, one that embeds and one that trains are at work for 8.6 of 4 x 3.0. The trainer has the least to
# do, as in the paper's run.
PAIR_SECONDS, STEP_SECONDS, QUERY_SECONDS, BUILD_SECONDS = 4.8 / 12, 0.7, 0.1, 24.0
PAIR_TOKENS = 20  # words and white space of a pair, as the stand-in counts them: about
DOCUMENTS, STEPS = 480, 40
SETTINGS = {
    "retriever.path": "package:minilm",
    "data.source": "package:numpy_docstrings+transformers_code",
    "data.tokenizer": "retriever",
    "data.document_tokens": 16,
    "data.window": 16,
    "data.query_share": 0.3,
    "data.num_queries": 400,
    "data.num_heldout": 8,
    "data.num_documents": DOCUMENTS,
    "train.batch_size": 2,
    "retrieve.k": 6,
    "train.lr": 1e-4,
    "train.threads": 1,
    "index.threads_per_worker": 1,
    "index.block_documents": 8,
    "lm.tokens_per_batch": 16,  # by bytes: a pair is a unit
    "refresh.every_steps": 8,
    "refresh.lag_steps": 8,
    "checkpoint.every_steps": 1000,
    "evaluate.max_windows": 1,
    "evaluate.k": 1,
    "evaluate.refresh_windows": 0,
    "evaluate.num_resamples": 10,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One layout's run."""

    losses: list[float]
    rows: list[dict]
    pieces: list[Piece]
    idle: float  # share of the GPUs' time

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(row["time/step_seconds"] for row in self.rows)

    @property
    def late(self) -> float:
        return fmean(piece.computed > piece.asked for piece in self.pieces)

    def mean(self, role: str) -> float:
        return fmean(piece.held for piece in self.pieces if piece.role == role)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one device: a unit, a whole corpus, a step, the queries of a batch, and a batch's search."""

    unit: float
    build: float
    train: float
    encode: float
    search: float = 0.01


NOMINAL = Seconds(PAIR_SECONDS, BUILD_SECONDS, STEP_SECONDS, QUERY_SECONDS)


def seconds_of(run: Measured) -> Seconds:
    """As it was measured where every role is alone; the first step, which warms up, is left out as in a plan."""
    later = run.rows[1:]
    return Seconds(
        unit=run.mean("score"),
        build=run.mean("embed") * -(-DOCUMENTS // int(SETTINGS["index.block_documents"])),
        train=fmean(row["time/train_seconds"] for row in later),
        encode=sum(row["time/retrieve_seconds"] for row in run.rows) / len(run.rows),
        search=fmean(row["time/search_seconds"] for row in later),
    )


def keys_of(steps: int) -> list[str]:
    return [f"{key}={value}" for key, value in {**SETTINGS, "train.max_steps": steps}.items()]


def job_of_benchmark(steps: int) -> Job:
    return job_of(load_config(CONFIG, keys_of(steps)), num_documents=DOCUMENTS)


def simulated(job: Job, split: Split, seconds: Seconds) -> SimulatedRun:
    """By the planner, from these seconds in place of FLOP and rates."""
    build = seconds.build / (split.num_builders or split.embed)
    durations = Durations(
        encode=seconds.encode,
        search=seconds.search,
        scoring=ScoringSeconds(seconds.unit, job.shape.step.pairs),
        train=seconds.train,
        build=build,
        stages=StageSeconds(build, build),
        files=-(-DOCUMENTS // int(SETTINGS["index.block_documents"])),
    )
    if split.placed is not None:
        return simulate_shared(job.shape, durations, split.placed)
    return simulate(job.shape, durations, allocation_of(split))


def training_seconds(run: SimulatedRun) -> float:
    return run.times.training_ended - run.times.steps_began


def idle_share(job: Job, split: Split, seconds: Seconds) -> float:
    """Of all GPUs while it trains, by the plan: what the work of the steps and of the refreshes leaves of them."""
    shape, run = job.shape, simulated(job, split, seconds)
    step = shape.step.pairs * seconds.unit + seconds.train + seconds.encode
    return 1 - (shape.steps * step + shape.num_refreshes * seconds.build) / (GPUS * training_seconds(run))


def best_of(job: Job, is_shared: bool) -> Split:
    """The fastest by the plan, with one rank."""
    splits = fitting_splits(job, Devices(accelerator_named("", MEMORY_GB), GPUS, 1))
    one_rank = [split for split in splits if split.train == 1 and (split.placed is not None) is is_shared]
    return min(one_rank, key=lambda split: training_seconds(simulated(job, split, NOMINAL)))


@contextmanager
def on_fake_gpus(folder: Path) -> Iterator[str]:
    """The address of a cluster whose processes know their pace; locks and notes are in the folder."""
    stated = Pace(str(folder), PAIR_SECONDS / PAIR_TOKENS, BUILD_SECONDS / DOCUMENTS, STEP_SECONDS, QUERY_SECONDS)
    with patch.dict(os.environ, stated.environment()), fake_cluster(1, GPUS, MEMORY_GB) as cluster:
        yield cluster.address


def run_one(folder: Path, address: str, split: Split, config: Config) -> Measured:
    """Train on the fake GPUs, in a process whose actors are paced."""
    settings = [f"{key}={value}" for key, value in settings_of(config, split).items() if key.startswith("resources.")]
    own = [f"ray.address={address}", f"run_dir={folder}", f"data.out={folder.parent / 'data'}", *settings]
    command = [sys.executable, "-m", "benchmarks.shared_roles", "--as-run", *keys_of(config.train.max_steps), *own]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=900)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Measured([row["train/loss"] for row in rows], rows, take_pieces(folder.parent), _idle(folder))


def _idle(run: Path) -> float:
    """What all roles leave of the GPUs; where roles take turns, more than that is idle."""
    shares = [of["idle"] for of in totals(RunDirectory(run).read_device_use()).values()]
    return (sum(shares) + GPUS - len(shares)) / GPUS


def train_paced(keys: Sequence[str]) -> None:
    """What `--as-run` does in a process of its own: `replug train`, paced. The pace is in its environment."""
    config = load_config(CONFIG, list(keys))
    configure_ray_environment(config)
    from benchmarks.paced_actors import pace  # imports Ray, which reads its environment then
    from replug.train.run import train

    pace()
    train(config)


def report(name: str, job: Job, split: Split, seconds: Seconds, run: Measured) -> float:
    """Prints planned and real; returns the seconds planned."""
    planned = training_seconds(simulated(job, split, seconds))
    roles = " / ".join(f"{count:g}" for count in split.by_role().values())
    print(
        f"{name}, {roles} GPUs score / embed / train: planned {planned:.1f} s of training, took {run.seconds:.1f} s "
        f"({planned / run.seconds - 1:+.1%}, asked {ASKED_ERROR:.0%}); {run.late:.1%} of {len(run.pieces)} pieces late"
    )
    print(f"  of the GPUs' time {idle_share(job, split, seconds):.0%} is idle by the plan, at least {run.idle:.0%} was")
    return planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="the first and the last 8 are without a refresh")
    parser.add_argument("--as-run", nargs="+", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_run:
        return train_paced(arguments.as_run)
    job = job_of_benchmark(arguments.steps)
    splits = {"split": best_of(job, is_shared=False), "shared": best_of(job, is_shared=True)}
    print(describe_machine(1), flush=True)
    with tempfile.TemporaryDirectory() as folder, on_fake_gpus(Path(folder)) as address:
        runs = {name: run_one(Path(folder) / name, address, split, job.config) for name, split in splits.items()}
    return compare(job, splits, runs)


def compare(job: Job, splits: dict[str, Split], runs: dict[str, Measured]) -> None:
    seconds = seconds_of(runs["split"])
    print(
        f"measured in the split: {seconds.unit:.3f} s a unit, {seconds.build:.2f} s a build by one builder, "
        f"{seconds.train:.3f} s a step, {seconds.encode:.3f} s a batch's queries, {seconds.search:.3f} s its search"
    )
    planned = {name: report(name, job, splits[name], seconds, run) for name, run in runs.items()}
    ratio = runs["split"].seconds / runs["shared"].seconds
    print(f"shared roles are faster by {ratio:.2f}x (asked: {ASKED_RATIO}x), ", end="")
    print(f"planned {planned['split'] / planned['shared']:.2f}x")
    same = runs["split"].losses == runs["shared"].losses
    print(f"losses of {len(runs['split'].losses)} steps: {'equal to the last bit' if same else 'NOT EQUAL'}")
    if any(run.late > LATE for run in runs.values()):
        print(f"more than {LATE:.0%} of the pieces were late: this machine was too busy, the times say nothing")


if __name__ == "__main__":
    main()
