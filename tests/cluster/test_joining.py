"""Ray clusters that cannot be joined: one line that says why, within a minute, and nothing begun."""

import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray

from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.errors import UserError
from replug.config.load import load_config
from tests.support.command_line import ROOT, clean_environment
from tests.support.local_cluster import join, local_cluster

pytestmark = pytest.mark.slow

SECONDS = 60


def refused(*overrides: str) -> str:
    """Why a training run cannot join."""
    config = load_config(ROOT / "configs/debug.yaml", overrides)
    began = time.monotonic()
    with pytest.raises(UserError) as error, ray_cluster(config):
        pass
    assert time.monotonic() - began < SECONDS
    return str(error.value)


def refused_process(run: Path, *overrides: str, environment: dict[str, str] | None = None) -> str:
    """The one line that `replug train` ends with."""
    command = [sys.executable, "-m", "replug.commands.cli", "train", str(ROOT / "configs/debug.yaml"), f"run_dir={run}"]
    environment = {**clean_environment(), **(environment or {})}
    done = subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert not (run / "index").exists()
    return done.stderr.splitlines()[-1]


@contextmanager
def guarded_cluster(token: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster that asks for a token; yields its address, and the environment of somebody who has one."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(token)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    options = [f"--port={port}", "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**clean_environment(), **environment}, **quiet)
    try:
        wait_for_port(port)
        yield f"127.0.0.1:{port}", environment
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(port: int) -> None:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
    raise AssertionError("Ray did not start")


@pytest.mark.nightly
def test_a_token_that_is_not_the_clusters(tmp_path):
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(secrets.token_hex(32))
    with guarded_cluster(secrets.token_hex(32)) as (address, environment):
        wrong = {**environment, "RAY_AUTH_TOKEN_PATH": str(other)}
        line = refused_process(tmp_path / "run", f"ray.address={address}", environment=wrong)
        assert f"its token: RAY_AUTH_TOKEN_PATH is {other}" in line
        assert other.read_text() not in line
        without = refused_process(tmp_path / "run", f"ray.address={address}", environment={"RAY_AUTH_MODE": "disabled"})
        assert "cannot join a cluster" in without


def test_a_cluster_without_the_cpus_that_are_asked_for(ray_address):
    line = refused(f"ray.address={ray_address}", "resources.train=8")
    assert "the cluster has 8 CPUs" in line
    assert "resources.train" in line


# Files that a node does not see ---------------------------------------------------------------------------------------


# Another folder for every process: that of the worker on the other node is none of ours.
OWN_FOLDER = Path("/proc/self/cwd")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """The driver's, and one other."""

    room = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    with local_cluster(room, room) as address:
        join(address)
        yield
        ray.shutdown()


def test_files_that_all_nodes_see_are_accepted_and_nothing_is_left_of_the_look(two_nodes, tmp_path):
    (tmp_path / "data").mkdir()
    require_seen_by_all(tmp_path / "run/index", [tmp_path / "data"])
    assert list((tmp_path / "run/index").iterdir()) == []


def test_a_run_directory_that_another_node_does_not_see_is_refused_within_seconds(two_nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        require_seen_by_all(OWN_FOLDER / "run", [tmp_path])
    assert time.monotonic() - began < 60
    said = r"ray\.address: node \d+\.\d+\.\d+\.\d+ does not see /proc/self/cwd/run/seen-\w+; put run_dir, data and"
    assert re.match(said, str(refused.value))
    assert list((tmp_path / "run").iterdir()) == []
