"""What a refresh costs the trainer: steps while the corpus is being embedded against steps while it is not, in one run.

    python -m benchmarks.refresh_rate

Trainer and builder have one thread each, so on two cores each has its own; the LM is a stand-in that takes no time, so
that nothing hides what the trainer loses. MiniLM, real texts, refreshes one after the other with pauses between.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import describe_machine

SETTINGS = {
    "lm.path": "stand_in",
    "data.num_documents": 600,
    "train.batch_size": 2,  # short steps, so that many of them fall into one refresh
    "retrieve.k": 4,
    "train.pipeline_depth": 1,
    "loss.beta": 0.5,
    "evaluate.max_examples": 5,
}


def run(folder: Path, steps: int, every: int) -> list[dict]:
    """The metrics of a run with a refresh every so many steps."""
    settings = {**SETTINGS, "train.max_steps": steps, "refresh.every_steps": every, "refresh.lag_steps": every - 1}
    command = [sys.executable, "-m", "replug.commands.cli", "train", "configs/quickstart.yaml"]
    given = [f"{key}={value}" for key, value in {"run_dir": folder, **settings}.items()]
    subprocess.run([*command, *given], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=50, help="steps between two refreshes")
    arguments = parser.parse_args()
    machine = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder) / "run", arguments.steps, arguments.every)[3:]  # the first steps warm up
    print(machine)
    seconds = {
        kind: [row["time/step_seconds"] for row in rows if row["index/refresh_under_way"] == kind] for kind in (0, 1)
    }
    alone, meanwhile = (statistics.median(seconds[kind]) for kind in (0, 1))
    print(f"steps alone:            {len(seconds[0]):4d}, median {1000 * alone:.0f} ms")
    print(f"steps during a refresh: {len(seconds[1]):4d}, median {1000 * meanwhile:.0f} ms")
    print(f"rate during a refresh: {alone / meanwhile:.3f} of the rate without")
    swaps = [row for row in rows if row["index/swapped"]]
    print("swaps waited", ", ".join(f"{row['index/swap_wait_seconds']:.2f} s" for row in swaps))
    print("switches took", ", ".join(f"{row['index/swap_ms']:.1f} ms" for row in swaps))


if __name__ == "__main__":
    main()
