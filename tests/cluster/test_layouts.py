"""The paper's actors on fake nodes with Ray's fake GPUs: the real index service, stand-ins for scorers and ranks.

Who is on which GPU is asked of the actors themselves. And files that not all nodes see.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from replug.cluster import places
from replug.cluster.layout import BUILDER, CONTEXT_BYTES, SCORER, SEARCHER, TRAINER, lay_out, nodes_of
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.index_workers.service import IndexService
from replug.planning.memory import run_sizes
from tests.support.command_line import ROOT
from tests.support.local_cluster import join, local_cluster

Where = tuple[str, tuple[str, ...], str | None]  # node, GPU ids, CUDA_VISIBLE_DEVICES


class StandIn:
    """A scorer or a rank."""

    def answer(self) -> str:
        return "here"


def where(actor: Any) -> Where:
    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids()["GPU"])
    return context.get_node_id(), gpus, os.environ.get("CUDA_VISIBLE_DEVICES")


A100 = 80e9
SECONDS = 400  # a process of Ray takes seconds to start where many share two cores


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[..., str]]:
    """Those of one shape are started once: a node takes seconds of both cores."""
    with ExitStack() as started:

        @cache
        def start(*gpus: int) -> str:
            room = {"num_cpus": 64, "object_store_memory": 80 * 2**20}
            cluster = started.enter_context(local_cluster(*({**room, "num_gpus": count} for count in gpus)))
            return str(cluster.address)

        yield start


@pytest.fixture
def cluster(clusters: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`cluster(2, 2)`: the address of nodes with so many fake GPUs of 80 GB; the command runs on the first."""
    monkeypatch.setattr(places, "free_memory", lambda nodes: {node.name: A100 for node in nodes if node.gpus})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return clusters


def paper(address: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs/paper.yaml", [f"ray.address={address}", *overrides])


def all_places(config: Config, index: IndexService) -> dict[tuple[str, int], Where]:
    """Where every actor is: the index service's own, and stand-ins made as scorers and ranks are."""
    stand_in = ray.remote(StandIn)
    counts = {TRAINER: int(config.resources.train), SCORER: places.scorer_actors()[0]}
    actors = {
        (key, number): stand_in.options(**places.place(key, number, {})).remote()
        for key, count in counts.items()
        for number in range(count)
    }
    actors.update({(BUILDER, number): actor for number, actor in enumerate(index.builders.handles())})
    actors.update({(SEARCHER, number): actor for number, actor in enumerate(index.searchers.actors)})
    asked = {of: actor.__ray_call__.remote(where) for of, actor in actors.items()}
    found = ray.get(list(asked.values()), timeout=SECONDS)  # which an actor without a place would not answer
    return dict(zip(asked, found, strict=True))


def check_layout(address: str, folder: Path, *overrides: str) -> dict[tuple[str, int], Where]:
    config = paper(address, *overrides)
    sizes = run_sizes(config, config.data.num_documents, has_bfloat16=True)
    with ray_cluster(config, sizes=sizes) as laid_out:
        here = ray.get_runtime_context().get_node_id()
        nodes = [replace(node, gpu_bytes=A100) for node in nodes_of(ray.nodes(), here)]
        with closing(IndexService(folder)) as index:
            found = all_places(laid_out, index)
        planned = lay_out(config, nodes, sizes)
    num_bytes = {(actor.key, actor.number): actor.bytes_per_gpu for actor in planned.actors}
    on_gpu: dict[tuple[str, str], float] = defaultdict(lambda: -CONTEXT_BYTES)  # the first process's is not counted
    for actor, (node, gpus, visible) in found.items():
        assert visible == ",".join(gpus), actor  # an actor without GPUs sees none
        for gpu in gpus:
            on_gpu[node, gpu] += num_bytes[actor] + CONTEXT_BYTES
    assert set(num_bytes) == set(found)
    assert found[TRAINER, 0][0] == here
    assert sorted(on_gpu.values()) == pytest.approx(sorted(gpu.num_bytes for gpu in planned.gpus))
    assert max(on_gpu.values()) <= 0.92 * A100
    return found


@pytest.mark.slow
def test_scoring_and_the_index_on_the_same_gpus(cluster, tmp_path):
    found = check_layout(cluster(2, 2), tmp_path)
    assert all(found[SEARCHER, n] == found[BUILDER, n] == found[SCORER, n] for n in range(3))


@pytest.mark.nightly
def test_searchers_in_host_memory_see_no_gpus_and_others_keep_theirs(cluster, tmp_path):
    keys = ["index.kind=pq", "index.num_shards=2"]
    found = check_layout(cluster(2, 2), tmp_path, *keys)
    assert [found[SEARCHER, number][1:] for number in range(2)] == [((), "")] * 2
    assert len({found[SEARCHER, number][0] for number in range(2)}) == 2  # each node's memory has a half
    assert all(len(found[key, 0][1]) == 1 for key in (TRAINER, BUILDER, SCORER))


@pytest.mark.slow
def test_gpus_that_another_job_holds_are_said_so(cluster, monkeypatch):
    monkeypatch.setattr(places, "RESERVE_SECONDS", 1.0)
    address, other = cluster(2, 2), {"name": "other", "namespace": "other"}
    with connected(address):
        here = {"num_gpus": 2, "resources": {"node:__internal_head__": 0.1}}
        holder = ray.remote(StandIn).options(**here, lifetime="detached", **other).remote()
        ray.get(holder.answer.remote(), timeout=SECONDS)
    try:
        with (
            pytest.raises(UserError, match=r"a GPU for trainer rank 0 is not free within 1 s"),
            ray_cluster(paper(address)),
        ):
            pass
    finally:
        with connected(address):
            ray.kill(ray.get_actor(**other))


@contextmanager
def connected(address: str) -> Iterator[None]:
    join(address)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_run_directory_that_another_node_does_not_see_is_refused_within_seconds(clusters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    began = time.monotonic()
    with connected(clusters(2, 2)):
        require_seen_by_all(tmp_path / "run", [tmp_path / "data"])
        said = r"ray\.address: node \S+ does not see /proc/self/cwd/run/seen-\w+; put run_dir, data and"
        with pytest.raises(UserError, match=said):  # another folder for every process
            require_seen_by_all(Path("/proc/self/cwd/run"), [tmp_path])
    assert time.monotonic() - began < 60
    assert list((tmp_path / "run").iterdir()) == [], "nothing is left of the look"


def gpu(uuid: str) -> Any:
    return type("Properties", (), {"uuid": uuid, "total_memory": 80 * 2**30})


def test_the_gpu_of_rank_0_is_found_by_its_name_and_not_by_rays_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu(["uuid-b", "uuid-a"][number]))
    assert places.device_of(("0", "uuid-a")) == 1
    assert places.device_of(("GPU-6e6a1b5c", "uuid-b")) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(UserError, match=r"GPU 7 \(uuid-c\), but this command sees uuid-b, uuid-a: .* it is 3,4"):
        places.device_of(("7", "uuid-c"))
    with pytest.raises(UserError, match="which its workers do not see"):
        places.device_of(("7", None))
