"""Preparing as tasks of a real Ray cluster of three nodes, one of which is killed on the way."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.ray_nodes import QUICK_DEATHS, RayCluster

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


# Replicas of a pool ---------------------------------------------------------------------------------------------------


SCRIPT = """
import time
import ray  # noqa: E402
from ray.cluster_utils import Cluster
from replug.models.lm_source import GivenSource  # noqa: E402
from replug.models.local.stand_in_lm import StandInLM  # noqa: E402
from replug.models.scorer_pool import ScorerPool  # noqa: E402
from tests.support.local_cluster import join

def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)

head = {"num_cpus": 1, "object_store_memory": 10**8, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
join(cluster.address)
pool = ScorerPool(GivenSource(StandInLM(0.1)), num_replicas=2, threads=1)
until(lambda: pool.pool.num_up == 1)
print("one replica, the other waits for room", flush=True)
calls = [pool.submit([f"a {i} b"], [f" {i}"]) for i in range(150)]
node = cluster.add_node(num_cpus=1, object_store_memory=10**8)
until(lambda: pool.pool.num_up == 2)
print("joined", flush=True)
done = sum(call.done() for call in calls)
cluster.remove_node(node, allow_graceful=False)
until(lambda: pool.pool.counts.respawns > 0)
print("left", flush=True)
scores = [call.result(120) for call in calls]
expected = [GivenSource(StandInLM()).load().score([f"a {i} b"], [f" {i}"]) for i in range(150)]
assert [s[0].sum_logprob for s in scores] == [s[0].sum_logprob for s in expected]
assert 0 < done < 150
print("all", len(scores), "scores", pool.pool.num_up, "up", flush=True)
pool.close()
ray.shutdown()
cluster.shutdown()
"""


def test_replicas_join_and_leave_with_their_nodes():
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: sockets lie in it
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", **QUICK_DEATHS, "RAY_TMPDIR": folder},
            start_new_session=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ours = ["one replica, the other waits for room", "joined", "left", "all 150 scores 1 up"]
    assert [line for line in done.stdout.splitlines() if line in ours] == ours  # Ray says much when a node dies
