"""Preparing as tasks of a real Ray cluster of three nodes, one of which is killed on the way."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ray_nodes import RayCluster

pytestmark = pytest.mark.nightly

FILES = 24


def write_source(folder: Path) -> Path:
    """Files of texts, each a unit of its own."""
    folder.mkdir()
    for number in range(FILES):
        rows = (
            {"id": f"{number}-{row}", "text": " ".join(f"word{(number * row * i) % 9973}" for i in range(800))}
            for row in range(1, 40)
        )
        (folder / f"{number:02d}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def begin(source: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "replug.commands.cli", "prepare", "configs/own_data.yaml", f"data.source={source}"]
    options = (
        "retriever.path=stand_in",
        "data.tokenizer=retriever",
        f"data.out={out}",
        "data.context_tokens=16",
        *options,
    )
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_cluster_gives_the_bytes_of_one_process_also_when_a_node_is_lost(tmp_path):
    source = write_source(tmp_path / "source")
    finish(begin(source, tmp_path / "alone"))
    with RayCluster(nodes=2) as cluster:
        process = begin(source, tmp_path / "cluster", f"ray.address={cluster.address}", "data.num_workers=6")
        units = tmp_path / "cluster" / "work" / "source_shards"
        while process.poll() is None and len(list(units.glob("*/report.json"))) < 3:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        cluster.kill_node(0)
        finish(process)
    assert contents(tmp_path / "cluster") == contents(tmp_path / "alone")
