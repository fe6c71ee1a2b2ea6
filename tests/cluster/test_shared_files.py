"""A node that does not see the run's files is named before anything heavy starts."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replug.cluster import ray_cluster
from replug.cluster.ray_cluster import require_seen_by_all
from replug.config.errors import UserError
from tests.support.local_cluster import join, local_cluster

pytestmark = pytest.mark.slow

# Another folder for every process: that of the worker on the other node is none of ours.
OWN_FOLDER = Path("/proc/self/cwd")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """The driver's, and one other."""
    import ray

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


def test_a_node_that_does_not_answer_is_warned_of(two_nodes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda asked, **_: ([], asked))
    require_seen_by_all(tmp_path, [])
    assert re.search(r"node \S+ does not say within \d+ s whether it sees", capsys.readouterr().err)
