"""Ray clusters that cannot be joined: one line that says why, within half a minute, and nothing begun."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.command_line import ROOT
from tests.support.ray_nodes import RayCluster

SECONDS = 30
PORT = 27_811


def refused(run: Path, *overrides: str, environment: dict[str, str] | None = None) -> str:
    """The one line that `replug train` ends with."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "replug.commands.cli", "train", str(ROOT / "configs/debug.yaml"), f"run_dir={run}"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *overrides], env={**clean, **(environment or {})}, capture_output=True, text=True, timeout=100
    )
    print(f"\n{time.monotonic() - began:.1f} s: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 2, done.stderr
    # Preparing the stand-in texts and importing everything come first.
    assert time.monotonic() - began < SECONDS + 15
    assert not (run / "index").exists()
    return done.stderr.splitlines()[-1]


@contextmanager
def deaf_listener() -> Iterator[int]:
    """A port that takes connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        taken: list[socket.socket] = []
        threading.Thread(target=lambda: take_all(listener, taken), daemon=True).start()
        yield listener.getsockname()[1]


def take_all(listener: socket.socket, taken: list[socket.socket]) -> None:
    while True:
        try:
            taken.append(listener.accept()[0])
        except OSError:
            return


@contextmanager
def guarded_cluster(token: str) -> Iterator[dict[str, str]]:
    """A cluster that asks for a token; yields the environment of somebody who has one."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(token)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    options = [f"--port={PORT}", "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**clean, **environment}, **quiet)
    try:
        wait_for_port(PORT)
        yield environment
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
    raise AssertionError("Ray did not start")


@pytest.mark.timeout(120)
def test_an_address_where_nothing_listens(tmp_path):
    line = refused(tmp_path / "run", "ray.address=127.0.0.1:1")
    assert line.startswith("replug: ray.address: cannot join a cluster at 127.0.0.1:1: ")


@pytest.mark.timeout(120)
def test_an_address_where_something_else_listens(tmp_path):
    with deaf_listener() as port:
        line = refused(tmp_path / "run", f"ray.address=127.0.0.1:{port}")
    assert "what listens there is no Ray" in line


@pytest.mark.timeout(200)
def test_a_token_that_is_not_the_clusters(tmp_path):
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(secrets.token_hex(32))
    with guarded_cluster(secrets.token_hex(32)) as environment:
        wrong = {**environment, "RAY_AUTH_TOKEN_PATH": str(other)}
        line = refused(tmp_path / "run", f"ray.address=127.0.0.1:{PORT}", environment=wrong)
        assert "the token may be another or have expired" in line
        assert other.read_text() not in line
        without = refused(tmp_path / "run", f"ray.address=127.0.0.1:{PORT}", "ray.auth=disabled")
        assert "RAY_AUTH_MODE is disabled" in without


@pytest.mark.timeout(200)
def test_a_cluster_without_the_gpus_or_the_cpus_that_are_asked_for(tmp_path):
    with RayCluster(nodes=1) as cluster:
        joined = (f"ray.address={cluster.address}", "ray.auth=disabled")
        line = refused(tmp_path / "run", *joined, "lm.gpus_per_replica=1")
        assert "0 GPUs" in line
        assert "lm.num_replicas, each 1 GPU" in line
        line = refused(tmp_path / "run", *joined, "resources.train=8")
        assert "the cluster has 4 CPUs" in line
        assert "resources.train" in line


@pytest.mark.timeout(200)
def test_of_two_clusters_on_one_machine_none_is_guessed(tmp_path):
    with RayCluster(nodes=0), RayCluster(nodes=0):
        line = refused(tmp_path / "run", "ray.address=auto", "ray.auth=disabled")
    assert line.startswith("replug: ray.address: cannot join a cluster at auto: ")
