"""Scorer replicas on a real Ray cluster, a node of which is lost on the way."""

import os
import subprocess
import sys
import tempfile

import pytest

from tests.cluster.ray_nodes import QUICK_DEATHS

pytestmark = pytest.mark.nightly

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
until(lambda: pool.pool.num_respawns > 0)
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
