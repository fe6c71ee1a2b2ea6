"""Who can reach a run from outside: the ranks' store listens on one address, Ray's files are this user's alone."""

import os
import subprocess
import sys

import psutil
import pytest
from torch.distributed import TCPStore

from replug.train.ranks import open_store
from tests.support.command_line import ROOT, clean_environment

LISTENS = """
import os, stat, sys, psutil
from pathlib import Path
from replug.config.load import load_config
from replug.cluster.environment import configure_ray_environment, private_folder

config = load_config(Path("configs/debug.yaml"), [])
configure_ray_environment(config)
from replug.cluster.ray_cluster import ray_cluster

with ray_cluster(config, roles=()):
    import ray
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert session.is_relative_to(private_folder()), session
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = {c.laddr.ip for p in mine for c in p.net_connections() if c.status == "LISTEN"}
    print(oct(stat.S_IMODE(private_folder().stat().st_mode)), *sorted(found))
    print(private_folder())
"""


def addresses() -> set[str]:
    return {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_the_store_of_the_ranks_listens_on_its_address_alone():
    before = addresses()
    store = open_store("127.0.0.1")
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
    assert addresses() - before <= {"127.0.0.1"}


@pytest.mark.slow
def test_a_cluster_of_our_own_is_on_loopback_in_a_folder_of_this_user():
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    modes, folder = done.stdout.splitlines()[-2:]
    mode, *listening = modes.split()
    assert mode == "0o700"
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}  # loopback in both notations
    assert not os.path.exists(folder)  # noqa: PTH110 - as a user would look
