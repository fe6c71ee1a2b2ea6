"""Steps a minute on one trainer rank and on two, one core each, where the LM takes no time; and whether losses agree.

python -m benchmarks.ranks
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
    "train.batch_size": 8,
    "retrieve.k": 4,
    "train.precision": "float32",
    "loss.beta": 0.5,
    "evaluate.max_examples": 1,
    "checkpoint.every_steps": 1000,
}


def run(folder: Path, ranks: int, steps: int) -> list[dict]:
    settings = {**SETTINGS, "train.max_steps": steps, "refresh.every_steps": 10 * steps, "resources.train": ranks}
    settings |= {"data.out": folder / "data", "run_dir": folder / f"{ranks}-ranks"}
    command = [sys.executable, "-m", "replug.commands.cli", "train", "configs/quickstart.yaml"]
    subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = (folder / f"{ranks}-ranks/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    machine = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = {ranks: run(Path(folder), ranks, arguments.steps) for ranks in (1, 2)}
    print(machine)
    seconds = {ranks: statistics.median(row["time/step_seconds"] for row in rows[ranks][3:]) for ranks in rows}
    for ranks, value in seconds.items():
        print(f"{ranks} rank(s): {60 / value:.1f} steps a minute ({value:.2f} s a step)")
    print(f"two ranks: {seconds[1] / seconds[2]:.2f}x")
    differences = [abs(a["train/loss"] - b["train/loss"]) for a, b in zip(rows[1], rows[2], strict=True)]
    print(f"largest difference of a loss over {len(differences)} steps: {max(differences):.1e}")


if __name__ == "__main__":
    main()
