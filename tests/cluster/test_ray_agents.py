"""What Ray has named among the processes below this one is ended with it, and nothing else."""

import subprocess
import sys
import time

import pytest

from replug.cluster.interruption import kill, ray_children
from replug.cluster.ray_cluster import ray_cluster

NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
print(1, flush=True)
time.sleep(60)
"""


def named(name: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", NAMED, name], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_rays_processes_below_this_one_are_killed_and_others_are_not() -> None:
    agent, other = named("ray::RuntimeEnvAgent"), named("wandb-core")
    try:
        found = ray_children()
        assert agent.pid in [process.pid for process in found]
        assert other.pid not in [process.pid for process in found]
        mine = [process for process in found if process.pid == agent.pid]
        kill(mine)
        assert agent.wait(timeout=10) == -9
        kill(mine)  # it is gone
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        for process in (agent, other):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_cluster_that_ends_leaves_the_agents_of_another_of_this_process_alone(debug_config) -> None:
    with named("ray::RuntimeEnvAgent") as other:
        before = ray_children()
        with ray_cluster(debug_config, roles=()):
            started = [child for child in ray_children() if child not in before]
            assert started
        assert not any(child.is_running() for child in started)
        assert other.poll() is None
        other.kill()
