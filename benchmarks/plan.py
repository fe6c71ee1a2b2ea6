"""Does `replug plan` say what happens? Three runs, each foretold from a short run of another shape, on this machine.

    python -m benchmarks.plan [--only lm-bound]      the runs themselves, about fifteen minutes of two cores
    python -m benchmarks.plan --table                the paper's run on several clusters, as Markdown
    python -m benchmarks.plan --sharing              the same, GPUs split among the roles and shared by them

For each regime a short run is measured, then a longer one with other T and depth is planned from it and run. Compared:
the whole time, the role that dominates, and the steps done by the end of each minute of training. MiniLM, real texts;
the LM is a stand-in that sleeps, so which role is the slowest is chosen and not found.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from benchmarks.machine import describe_machine
from replug.commands.plan import PlanOutput, PlanRequest, run_plan
from replug.config.load import load_config
from replug.config.schema import Config
from replug.planning.estimate import dominating
from replug.planning.measured import MeasuredRun, job_of_run, observe, read_run
from replug.planning.plans import Plan, make_plan

ROOT = Path(__file__).parent.parent
CONFIG, PAPER = ROOT / "configs/debug.yaml", ROOT / "configs/paper.yaml"
ASKED_WALL, ASKED_PACE = 0.20, 0.15
CLUSTERS = ["8xA100", "64xA100", "8xH100", "64xH100"]
Settings = dict[str, float | str]

COMMON: Settings = {
    "retriever.path": "package:minilm",
    "data.source": "package:numpy_docstrings+transformers_code",
    "data.tokenizer": "retriever",
    "data.document_tokens": 64,
    "data.window": 32,
    "data.query_share": 0.3,
    "data.num_queries": 800,
    "data.num_heldout": 20,
    "evaluate.max_windows": 10,
    # A thread each: trainer and builder then have a core of their own where there are two.
    "train.threads": 1,
    "index.threads_per_worker": 1,
    "checkpoint.every_steps": 10,
}


@dataclass(frozen=True, slots=True)
class Regime:
    """What makes one role the slowest; the run that is measured, and the run that is foretold from it."""

    dominates: str
    settings: Settings
    short: Settings
    long: Settings


REGIMES = {
    "lm-bound": Regime(
        "score",
        {"lm.path": "stand_in:1.0", "data.num_documents": 200, "train.batch_size": 2, "retrieve.k": 2},
        {"train.max_steps": 25, "refresh.every_steps": 10, "refresh.lag_steps": 4, "train.pipeline_depth": 1},
        {"train.max_steps": 100, "refresh.every_steps": 25, "refresh.lag_steps": 10, "train.pipeline_depth": 2},
    ),
    "embed-bound": Regime(
        "embed",
        {"lm.path": "stand_in:0.05", "data.num_documents": 1000, "train.batch_size": 2, "retrieve.k": 2},
        {"train.max_steps": 20, "refresh.every_steps": 8, "refresh.lag_steps": 3, "train.pipeline_depth": 1},
        {"train.max_steps": 64, "refresh.every_steps": 16, "refresh.lag_steps": 8, "train.pipeline_depth": 2},
    ),
    "trainer-bound": Regime(
        "train",
        {"lm.path": "stand_in:0.1", "data.num_documents": 200, "train.batch_size": 8, "retrieve.k": 4},
        {"train.max_steps": 16, "refresh.every_steps": 6, "refresh.lag_steps": 3, "train.pipeline_depth": 1},
        {"train.max_steps": 60, "refresh.every_steps": 20, "refresh.lag_steps": 5, "train.pipeline_depth": 2},
    ),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Planned and real, in seconds and steps."""

    planned_wall: float
    real_wall: float
    planned_dominates: str
    real_dominates: str
    planned_pace: float  # steps a minute of training
    real_pace: float
    minutes: list[tuple[int, int]] = field(default_factory=list)  # steps done by the end of each, planned and real

    @property
    def wall_error(self) -> float:
        return self.planned_wall / self.real_wall - 1

    @property
    def pace_error(self) -> float:
        return self.planned_pace / self.real_pace - 1


def compare(plan: Plan, run: MeasuredRun) -> Comparison:
    """A plan beside the run that it foretold."""
    simulated = plan.estimate.simulated
    planned = [end - simulated.times.steps_began for end in simulated.step_ends]
    real = list(accumulate(row["time/step_seconds"] for row in run.rows))
    wall = sum(seconds for stage, seconds in run.times.items() if stage != "total")
    return Comparison(
        simulated.times.wall,
        wall,
        dominating(plan.job, plan.estimate),
        real_dominating(run),
        60 * len(planned) / planned[-1],
        60 * len(real) / real[-1],
        steps_by_minute(planned, real),
    )


def steps_by_minute(planned: list[float], real: list[float]) -> list[tuple[int, int]]:
    """Steps done by the end of each whole minute in which both are still training."""
    whole = int(min(planned[-1], real[-1]) // 60)
    return [
        (sum(end <= 60 * minute for end in planned), sum(end <= 60 * minute for end in real))
        for minute in range(1, whole + 1)
    ]


def real_dominating(run: MeasuredRun) -> str:
    """The role that was at work for longest, as `dominates` of a plan means it."""
    seen, steps = observe(run, job_of_run(run, None, None)), len(run.rows)
    refreshes = sum(row["index/swapped"] for row in run.rows)
    busy = sum(row["scoring/busy_share"] * row["time/step_seconds"] for row in run.rows)
    seconds = {
        "score": busy,
        "embed": seen.stages.first_build + seen.stages.last_build + refreshes * seen.build,
        "train": steps * (seen.train + seen.encode),
        "search": steps * seen.search,
    }
    return max(seconds, key=lambda role: seconds[role])


def run_one(folder: Path, name: str, regime: Regime, own: Settings) -> list[str]:
    """Train in folder/name over the texts that are prepared once; returns the overrides."""
    settings = {**COMMON, **regime.settings, **own, "run_dir": str(folder / name), "data.out": str(folder / "data")}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    commands = (["prepare"], ["train"]) if not (folder / "data" / "manifest.json").is_file() else (["train"],)
    for command in commands:
        whole = [sys.executable, "-m", "replug.commands.cli", *command, str(CONFIG), *overrides]
        subprocess.run(whole, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1200)
    return overrides


def foretell(folder: Path, name: str) -> Comparison:
    """Measure the short run, plan the long one, run it."""
    regime = REGIMES[name]
    (folder / name).mkdir(parents=True, exist_ok=True)
    run_one(folder / name, "short", regime, regime.short)
    overrides = run_one(folder / name, "long", regime, regime.long)
    plan = make_plan(load_config(CONFIG, overrides), None, measured_run=folder / name / "short")
    return compare(plan, read_run(folder / name / "long"))


def report(name: str, found: Comparison) -> None:
    right = found.planned_dominates == found.real_dominates == REGIMES[name].dominates
    print(
        f"{name}: planned {found.planned_wall:.0f} s, took {found.real_wall:.0f} s ({found.wall_error:+.1%}, asked "
        f"{ASKED_WALL:.0%}); dominated by {found.planned_dominates}, in truth {found.real_dominates} "
        f"({'right' if right else 'WRONG'}); {found.planned_pace:.1f} steps a minute, in truth {found.real_pace:.1f} "
        f"({found.pace_error:+.1%}, asked {ASKED_PACE:.0%})"
    )
    print("  steps by the end of each minute, planned/real: " + ", ".join(f"{p}/{r}" for p, r in found.minutes))


def sharing_table() -> str:
    """Wall time of the best split and of the best plan beside what it were if no GPU was ever idle."""
    rows = ["| GPUs | GPU hours / GPUs | split: score/embed/train, wall, ratio | shared |", "|---|---|---|---|"]
    for gpus in CLUSTERS:
        cells = [_planned(load_config(PAPER, overrides), gpus) for overrides in (["lm.gpus_per_replica=1"], [])]
        rows.append(f"| {gpus} | {cells[1][0]:.2f} h | {' | '.join(text for _, text in cells)} |")
    return "\n".join(rows)


def _planned(config: Config, gpus: str) -> tuple[float, str]:
    """The hours of work for each GPU, and the split with its wall time and the ratio of both."""
    plan = make_plan(config, gpus)
    hours, wall = plan.estimate.hours, plan.estimate.simulated.times.wall / 3600
    least = sum(hours[role] for role in ("score", "embed", "train")) / plan.devices.count
    split = " / ".join(f"{count:g}" for count in plan.estimate.split.by_role().values())
    return least, f"{split}: {wall:.2f} h, {wall / least:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=REGIMES, action="append", help="one of the three runs; may be repeated")
    parser.add_argument("--table", action="store_true", help="only the table of the paper's run")
    parser.add_argument("--sharing", action="store_true", help="only the table of split and shared GPUs")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and compare those that are there")
    arguments = parser.parse_args()
    if arguments.table:
        return run_plan(PlanRequest(PAPER, CLUSTERS), PlanOutput(as_markdown=True))
    if arguments.sharing:
        return print(sharing_table())
    print(describe_machine(1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: foretell(arguments.keep or Path(folder), name) for name in arguments.only or REGIMES}
    for name, comparison in found.items():
        report(name, comparison)
    print(json.dumps({name: {"wall": c.wall_error, "pace": c.pace_error} for name, c in found.items()}))
    return None


if __name__ == "__main__":
    main()
