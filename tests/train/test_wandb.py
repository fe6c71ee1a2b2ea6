"""W&B offline, read back from what was written: no account, no network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import metrics


def value_of(tree: object, key: str) -> object:
    """The first value under a key, however deep."""
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return tree[key]
    values = (value_of(branch, key) for branch in tree.values())
    return next((value for value in values if value is not None), None)


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_is_one_run_with_every_metric_the_table_and_the_retriever(two_ranks: Path) -> None:
    run = two_ranks
    logs = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2, "one file for each time that the command was run, by rank 0 alone"
    assert {log.stem.removeprefix("run-") for log in logs} == {json.loads((run / "wandb.json").read_text())["id"]}
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(logs[-1])]
    last = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    measured = set().union(*metrics(run))
    assert [name for name in measured if value_of(last, name) is None] == []
    assert value_of(last, "train/loss") == pytest.approx(metrics(run)[-1]["train/loss"])
    assert value_of(last, "loss.beta") is not None
    results = json.loads((run / "results.json").read_text())["language_modelling"]["lsr"]
    for metric in ("bpb", "bpb - replug"):
        assert value_of(last, f"results/lsr/{metric}") == pytest.approx(results[metric]["value"])
    assert value_of(last, "verdict") == json.loads((run / "results.json").read_text())["verdict"]["verdict"]
    assert b"model.safetensors" in logs[-1].read_bytes(), "the artifact names the file"
