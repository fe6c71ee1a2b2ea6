"""The network interface, and the threads and agents of Ray."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import ray

from replug.cluster.environment import VARIABLES, use_interface_of
from replug.cluster.interruption import kill, ray_children
from replug.cluster.ray_cluster import ray_cluster
from tests.support.command_line import start, wait_for


def test_both_libraries_are_told_the_interface_of_the_address_and_what_a_user_has_set_stays(monkeypatch):
    known = {"lo": ["127.0.0.1"], "eth0": ["192.168.0.7", "fe80::1"], "ib0": ["10.1.0.7"]}
    found = {name: [SimpleNamespace(address=address) for address in addresses] for name, addresses in known.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    use_interface_of("10.1.0.8")
    assert not any(name in os.environ for name in VARIABLES)
    use_interface_of("10.1.0.7")
    assert [os.environ[name] for name in VARIABLES] == ["ib0", "=ib0"]
    use_interface_of("192.168.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
print(1, flush=True)
time.sleep(600)
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
        assert agent.wait(timeout=60) == -9
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
        try:
            before = ray_children()
            with ray_cluster(debug_config, roles=()):
                started = [child for child in ray_children() if child not in before]
                assert started
                nice = ray.get(ray.remote(lambda: os.nice(0)).remote(), timeout=100)
                assert nice == os.nice(0), "workers are no slower than the command beside other programs"
            _, alive = psutil.wait_procs(started, timeout=60)  # a killed process takes a moment to go
            assert not alive
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.slow
def test_a_killed_raylet_ends_the_command_with_a_line_and_the_status_that_requeues_it(tmp_path) -> None:
    """Kill the raylet with SIGKILL, as Linux does where memory runs short."""
    run = tmp_path / "run"
    process = start(run, "train.max_steps=4000", "checkpoint.every_steps=4", "lm.path=stand_in:0.2")
    for _ in range(300):
        time.sleep(0.5)
        if (run / "metrics.jsonl").is_file() and (run / "checkpoints").is_dir():
            break
    time.sleep(2)
    [raylet] = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "raylet"]
    raylet.kill()
    said = wait_for(process, 75, seconds=60).splitlines()
    assert said[-1].startswith("replug: Ray's raylet was killed, as the system does when memory is short; the same")
    assert any((run / "checkpoints").iterdir())
