"""W&B offline and TensorBoard, read back from what was written: no account, no network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replug.train.report import device_shares
from replug.train.run_dir import RunDirectory
from tests.support.runs import metrics

pytestmark = pytest.mark.slow

WANDB = str(Path(sys.executable).parent / "wandb")


@pytest.fixture
def run(two_ranks: Path) -> Path:
    return two_ranks


def logs(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"))


def summary(log: Path) -> dict:
    command = [WANDB, "leet", "inspect", "--summary", "--json", str(log)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)


def test_a_resumed_run_of_two_ranks_is_one_run_with_every_metric(run):
    assert len(logs(run)) == 2, "one file for each time that the command was run, by rank 0 alone"
    assert {log.stem.removeprefix("run-") for log in logs(run)} == {json.loads((run / "wandb.json").read_text())["id"]}
    last = summary(logs(run)[-1])
    measured = set().union(*metrics(run))
    assert [name for name in measured if find(last, name) is None] == []
    assert find(last, "train/loss") == pytest.approx(metrics(run)[-1]["train/loss"])
    assert find(last, "loss.beta") is not None
    used = device_shares(RunDirectory(run).read_device_use())
    assert {role for shares in used.values() for role, share in shares.items() if share} >= {"score", "embed", "train"}
    assert all(find(last, f"devices/{device}/score") is not None for device in used), "as the report has them"


def test_the_table_and_the_tuned_retriever_go_there_too(run):
    last, results = summary(logs(run)[-1]), json.loads((run / "results.json").read_text())
    of = results["language_modelling"]["lsr"]
    for metric in ("bpb", "bpb - replug"):
        assert find(last, f"results/lsr/{metric}") == pytest.approx(of[metric]["value"])
    assert b"model.safetensors" in logs(run)[-1].read_bytes(), "the artifact names the file"


def find(tree: object, key: str) -> object:
    """The first value under a key, however deep."""
    if isinstance(tree, dict):
        if key in tree:
            return tree[key]
        found = [find(value, key) for value in tree.values()]
        return next((value for value in found if value is not None), None)
    return None
