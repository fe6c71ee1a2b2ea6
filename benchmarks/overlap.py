"""What a step takes beside the LM: at depth 0 the sum of all parts, at depth 2 what does not hide behind the LM.

    python -m benchmarks.overlap                # a stand-in LM that sleeps 100 ms a batch in a process of its own
    python -m benchmarks.overlap --lm smollm2   # SmolLM2 on both cores, real text, 20 documents for each text

MiniLM, the real index and real texts. The LM's time alone is that of the run at depth 0, where nothing else goes on
while a step waits for its scores: the same pairs, the same pool. A run of another depth retrieves with older weights,
so its documents differ a little. All steps count, also the last, whose training hides behind nothing.
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

COMMON = {
    "evaluate.max_examples": 1,
    "checkpoint.every_steps": 1000,
    "loss.beta": 0.5,
}
SETTINGS = {
    # Units of one pair, 100 ms each. Texts are short, so that a pair takes the trainer less than the LM.
    # The trainer has one of two cores: with both it gets into the way of the LM's process (1.055 of the LM alone).
    "stand_in": {
        "lm.path": "stand_in:0.1",
        "lm.tokens_per_batch": 4,
        "data.num_documents": 600,
        "data.document_tokens": 12,
        "data.context_tokens": 12,
        "train.batch_size": 4,
        "retrieve.k": 16,
    },
    "smollm2": {"data.num_documents": 600, "train.batch_size": 2, "retrieve.k": 20},
}
STEPS = {"stand_in": 24, "smollm2": 12}


def run(folder: Path, lm: str, depth: int, steps: int) -> list[dict]:
    """The metrics of a run without refreshes."""
    settings = {**COMMON, **SETTINGS[lm], "train.max_steps": steps, "train.pipeline_depth": depth}
    settings |= {"refresh.every_steps": 10 * steps, "data.out": folder / "data", "run_dir": folder / f"depth-{depth}"}
    command = [sys.executable, "-m", "replug.commands.cli", "train", "configs/quickstart.yaml"]
    subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = (folder / f"depth-{depth}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def mean(rows: list[dict], *causes: str) -> float:
    """Seconds a step that went into these causes."""
    return statistics.mean(sum(row[f"time/{cause}_seconds"] for cause in causes) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", choices=sorted(SETTINGS), default="stand_in")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    machine = describe_machine(2)
    with tempfile.TemporaryDirectory() as folder:
        steps = STEPS[arguments.lm]
        rows = {depth: run(Path(folder), arguments.lm, depth, steps) for depth in arguments.depths}
    print(machine)
    alone, rest = mean(rows[0], "wait_scores"), mean(rows[0], "train", "retrieve")
    print(f"the LM alone {alone:.3f} s a step; training and encoding {rest:.3f} s; their sum {alone + rest:.3f} s")
    for depth, measured in rows.items():
        step = mean(measured, "step")
        of_sum = step / (alone + rest)
        print(f"depth {depth}: {step:.3f} s a step, {step / alone:.3f} of the LM alone, {of_sum:.3f} of the sum")


if __name__ == "__main__":
    main()
