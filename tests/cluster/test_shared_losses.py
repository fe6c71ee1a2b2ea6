"""A layout says where work is done, and the losses are the same bits: whole runs on two fake GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replug.train.figures import totals
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT
from tests.support.fake_cluster import fake_cluster

SPLIT = {"train": 0.5, "index": 0.5, "score": 1}
SHARED = {"train": 1, "index": 2, "score": 2}


def losses(address: str, run_dir: Path, resources: dict[str, float]) -> list[float]:
    keys = [f"resources.{role}={gpus}" for role, gpus in resources.items()]
    keys += [f"ray.address={address}", f"run_dir={run_dir}", "train.max_steps=24", "evaluate.max_examples=4"]
    command = [sys.executable, "-m", "replug.commands.cli", "train", str(ROOT / "configs/debug.yaml"), *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["index/swapped"] for row in rows) == 2
    return [row["train/loss"] for row in rows]


@pytest.mark.nightly
def test_the_losses_of_shared_gpus_are_those_of_a_split(tmp_path: Path) -> None:
    with fake_cluster(1, 2, 80.0) as cluster:
        split, shared = (
            losses(cluster.address, tmp_path / name, resources)
            for name, resources in (("split", SPLIT), ("shared", SHARED))
        )
    assert len(split) == 24
    assert shared == split
    assert roles_of(tmp_path / "split") == [{"embed", "search", "train"}, {"score"}]
    first, second = roles_of(tmp_path / "shared")
    assert {"embed", "train"} <= first and "embed" in second
    assert "score" in first | second  # whichever scorer was free has a step's one unit


def roles_of(run: Path) -> list[set[str]]:
    """That each GPU worked for."""
    shares = totals(RunDirectory(run).read_device_use())
    return [{role for role, share in of.items() if share and role != "idle"} for of in shares.values()]
