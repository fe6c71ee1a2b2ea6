"""`replug train` whole with every role on the GPU, beside the same run on the CPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.gpu.kit import Kit

ROOT = Path(__file__).parents[2]
SHORT = {
    "train.max_steps": 8,
    "train.batch_size": 4,
    "refresh.every_steps": 3,
    "refresh.lag_steps": 1,
    "retrieve.k": 4,
    "checkpoint.every_steps": 4,
    "evaluate.k": 4,
    "evaluate.max_examples": 8,
    "data.num_documents": 400,
    "data.num_queries": 100,
    "data.num_heldout": 20,
}
FLOAT32 = {"train.precision": "float32", "lm.dtype": "float32", "index.dtype": "float32"}
BFLOAT16 = {"train.precision": "bf16_mixed", "lm.dtype": "bfloat16", "index.dtype": "bfloat16"}


def short_runs(kit: Kit) -> None:
    """Hold each step's loss in float32 and in bfloat16 against the CPU's, over two swaps."""
    _compare(kit, {"float32": FLOAT32, "bfloat16": BFLOAT16})


def two_ranks(kit: Kit) -> None:
    """Train on two GPUs, and hold each step's loss against two ranks of the CPU."""
    if not kit.pretends and torch.cuda.device_count() < 2:
        kit.say("left out: needs two GPUs", 0)
        return
    ranks = {"resources.train": 2, "lm.path": "stand_in", "lm.dtype": "auto"}  # the ranks take the GPUs
    _compare(kit, {"two ranks": {**FLOAT32, **ranks}}, ranks)


def quickstart(kit: Kit) -> None:
    """Run configs/quickstart.yaml as it is, to its verdict."""
    run = kit.folder / "quickstart"
    seconds = _train(kit, run, {} if not kit.pretends else SHORT)
    kit.say("the quickstart, data and evaluation included", seconds, "s")
    lines = (kit.folder / "quickstart.log").read_text().splitlines()
    kit.say(
        "its verdict", next((line.strip() for line in lines if "HELPED" in line or "NO DIFFERENCE" in line), "none")
    )
    rows = _metrics(run)
    for key in ("time/wait_scores_seconds", "time/train_seconds", "index/swap_ms"):
        found = sorted(row[key] for row in rows if key in row)
        if found:
            kit.say(f"{key}, median of {len(found)} steps", found[len(found) // 2])


def _compare(kit: Kit, ways: Mapping[str, Mapping[str, object]], on_cpu: Mapping[str, object] | None = None) -> None:
    expected = kit.folder / "run-cpu"
    if not expected.is_dir() or on_cpu:
        expected = kit.folder / ("run-cpu-ranks" if on_cpu else "run-cpu")
        _train(kit, expected, {**SHORT, **FLOAT32, **(on_cpu or {})}, hides_gpus=True)
    losses = _losses(expected)
    for name, keys in ways.items():
        run = kit.folder / f"run-{name.replace(' ', '-')}"
        given = {key: value for key, value in keys.items() if not (kit.pretends and key == "resources.train")}
        kit.say(f"{name}: seconds of the run", _train(kit, run, {**SHORT, **given}), "s")
        found = _losses(run)
        kit.say(f"{name}: steps with a loss", len(found), "", at_least=len(losses))
        apart = [(version, abs(a - b)) for (version, a), (_, b) in zip(found, losses, strict=False)]
        is_exact = keys.get("lm.dtype") != "bfloat16"
        first = max((difference for version, difference in apart if version == 0), default=float("nan"))
        later = max((difference for version, difference in apart if version > 0), default=float("nan"))
        kit.say(f"{name}: loss from the CPU's, before a swap", first, "nats", 0.01 if is_exact else 0.1)
        # Other roundings may find other documents with the same similarities after a swap.
        kit.say(f"{name}: loss from the CPU's, after it", later, "nats", 0.05 if is_exact else None)


def _train(kit: Kit, run: Path, overrides: Mapping[str, object], hides_gpus: bool = False) -> float:
    config = "debug" if kit.pretends else "quickstart"
    keys = {**overrides, "run_dir": run, "data.out": kit.folder / f"data{len(overrides) > 0:d}"}
    command = [sys.executable, "-m", "replug.commands.cli", "train", f"configs/{config}.yaml"]
    command += [f"{key}={value}" for key, value in keys.items()]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hides_gpus or kit.pretends else {})}
    start = time.monotonic()
    log = kit.folder / f"{run.name}.log"
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, env=environment).returncode
    if status:
        print(log.read_text()[-3000:])
        raise SystemExit(f"{run.name} ended with status {status}; see {log}")
    return time.monotonic() - start


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _losses(run: Path) -> list[tuple[int, float]]:
    return [(int(row["index/version"]), row["train/loss"]) for row in _metrics(run) if "train/loss" in row]
