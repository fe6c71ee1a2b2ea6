"""The layouts of a run, and what they refuse."""

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import AuthenticationError

from replug.cluster import places
from replug.cluster.layout import (
    BUILDER,
    CONTEXT_BYTES,
    NAMES,
    ROLES,
    SCORER,
    SEARCHER,
    UNKNOWN,
    Layout,
    Node,
    Sizes,
    lay_out,
    num_ranks,
)
from replug.cluster.places import free_bytes, keep_to_memory_bound
from replug.cluster.ray_cluster import _require_same_gpus, ray_cluster, this_node
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.planning.memory import run_sizes

A100 = 80e9


def cpus(count: int) -> list[Node]:
    return [Node("here", count, 0, is_driver=True)]


def gpus(*counts: int, num_bytes: float | None = None, memory: float | None = None) -> list[Node]:
    """Nodes with so many GPUs each; the command runs on the first."""
    return [Node(f"node {n}", 64, each, num_bytes, memory, n == 0) for n, each in enumerate(counts)]


def configured(*overrides: str) -> Config:
    return load_config("configs/debug.yaml", overrides)


def paper(*overrides: str) -> tuple[Config, Sizes]:
    config = load_config("configs/paper.yaml", overrides)
    return config, run_sizes(config, config.data.num_documents, has_bfloat16=True)


def by_key(layout: Layout) -> dict[str, tuple[int, float]]:
    """Number of actors, and GPUs of each."""
    keys = dict.fromkeys(actor.key for actor in layout.actors)
    each = {actor.key: actor.gpus for actor in layout.actors}
    return {key: (sum(actor.key == key for actor in layout.actors), each[key]) for key in keys}


def on_gpus(layout: Layout) -> list[list[str]]:
    return [[f"{NAMES[actor.key]} {actor.number}" for actor in gpu.actors] for gpu in layout.gpus]


def refused(config: Config, nodes: Sequence[Node], sizes: Sizes = UNKNOWN) -> str:
    with pytest.raises(UserError) as error:
        lay_out(config, nodes, sizes)
    return str(error.value)


def test_without_cpus_for_all_actors_the_numbers_are_named():
    config = configured("resources.score=4", "resources.index=2")
    assert len(lay_out(config, cpus(7)).actors) == 7
    assert re.search(r"the cluster has 6 CPUs .*resources.index .*need 7", refused(config, cpus(6)))


ON_ONE = ["trainer rank 0", "searcher 0", "builder 0", "scorer 0"]
ALL = ["searcher 0", "builder 0", "scorer 0"]


@pytest.mark.parametrize(
    ("keys", "count", "first"),
    [
        ("", 1, [ON_ONE]),
        ("", 2, [["trainer rank 0"], ALL]),
        ("resources.train=2 resources.score=6", 8, [["trainer rank 0"], ["trainer rank 1"], ALL]),
        ("resources.index=2", 8, [["trainer rank 0"], ALL[:2], ["searcher 1", "builder 1"], ["scorer 0"]]),
        ("resources.index=2 index.num_shards=1", 8, [["trainer rank 0"], ALL[:2], ["builder 1"], ["scorer 0"]]),
        ("resources.index=1 index.kind=SQ8", 2, [["trainer rank 0"], ["builder 0", "scorer 0"]]),
    ],
)
def test_roles_have_whole_gpus_or_share_them(keys, count, first):
    found = lay_out(configured(*keys.split()), gpus(count))
    assert on_gpus(found)[: len(first)] == first
    again = lay_out(found.config, gpus(count))
    assert (again.gpus, again.config) == (found.gpus, found.config)


def test_the_papers_run_on_eight_gpus_scores_and_searches_on_seven():
    config, sizes = paper()
    for nodes in (gpus(8, num_bytes=A100), gpus(4, 4, num_bytes=A100)):
        found = lay_out(config, nodes, sizes)
        assert on_gpus(found)[:2] == [["trainer rank 0"], ALL]
        assert by_key(found)[SCORER] == (7, 0.3333)
        assert found.gpus[1].num_bytes == pytest.approx(110.6e9 / 7 + 0.54e9 + 0.9e9 + 3.6e9 + 2 * CONTEXT_BYTES, 0.01)
        assert all(gpu.num_bytes < gpu.limit for gpu in found.gpus)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("resources.score=7 resources.index=2", "resources.score=7, resources.index=2 do not fit the cluster's 8 GPUs"),
        ("resources.train=8", "resources.train=8, resources.score=0"),
    ],
)
def test_other_layouts_are_refused(keys, named):
    assert named in refused(configured(*keys.split()), gpus(8))


def test_a_cluster_that_does_not_answer_or_has_another_token_is_refused_with_what_to_set(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/other/token")
    said = "cannot join a cluster at 127.0.0.1:{port}: .*RAY_AUTH_TOKEN_PATH is /other/token"
    with pytest.raises(UserError, match=said.format(port=1)), ray_cluster(configured("ray.address=127.0.0.1:1")):
        pass
    monkeypatch.setattr(ray, "init", Mock(side_effect=AuthenticationError("no such token")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = configured(f"ray.address=127.0.0.1:{port}")
        with pytest.raises(UserError, match=said.format(port=port)), ray_cluster(config):
            pass


def test_a_command_without_a_gpu_does_not_train_on_its_processor_beside_a_cluster_with_gpus():
    nodes = [Node("login", 64, 0, is_driver=True, address="10.0.0.1"), Node("worker", 64, 8)]
    reason = refused(configured(), nodes)
    assert "runs on 10.0.0.1, where rank 0 trains, and that has no GPU, but the cluster has 8" in reason


def test_what_ray_counts_on_the_commands_node_torch_must_see(monkeypatch):
    config = configured()
    with pytest.raises(UserError, match="Ray counts GPUs on this machine, but torch sees none"):
        _require_same_gpus(lay_out(config, gpus(2)), ROLES, visible=0)
    with pytest.raises(UserError, match="torch sees 2 GPUs on this machine, but Ray was started here without any"):
        _require_same_gpus(lay_out(config, cpus(9)), ROLES, visible=2)
    _require_same_gpus(lay_out(config, gpus(2)), ROLES, visible=2)
    _require_same_gpus(lay_out(config, gpus(2), roles=["index"]), ["index"], visible=0)


@pytest.mark.parametrize("count", [1, 4])
def test_vectors_that_gpus_do_not_hold_are_searched_in_host_memory(count):
    config, sizes = paper(f"resources.train={max(1, count // 2)}")
    found = lay_out(config, gpus(count, num_bytes=A100 if count == 1 else 24e9), sizes)
    assert by_key(found)[SEARCHER] == (1, 0.0) and not found.index.search_on_gpu


@pytest.mark.parametrize("kind", ["flat_fp16", "sq8"])
def test_two_versions_that_no_memory_holds_are_refused(kind):
    config, sizes = paper(f"index.kind={kind}")
    nodes = gpus(1, num_bytes=A100, memory=50e9)
    assert "of each node's memory, which has 50.0 GB; expected index.kind=pq" in refused(config, nodes, sizes)
    config, sizes = paper("index.kind=pq")
    assert not lay_out(config, nodes, sizes).index.search_on_gpu


def test_a_rank_that_does_not_fit_is_refused():
    config, sizes = paper()
    assert num_ranks(lay_out(config, gpus(8, num_bytes=40e9), sizes).config) == 1
    assert "expected train.chunk_tokens=8192" in refused(config, gpus(8, num_bytes=24e9), sizes)


def test_an_lm_that_needs_several_gpus_has_them_for_itself(tmp_path):
    llama_2_70b = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    llama_2_70b |= {"intermediate_size": 28_672, "vocab_size": 32_000, "hidden_act": "silu", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({**llama_2_70b, "tie_word_embeddings": False}))
    config, sizes = paper(f"lm.path={tmp_path}", "resources.score=1")
    assert "resources.score is 1, but one LM takes 2 GPUs" in refused(config, gpus(8, num_bytes=A100), sizes)
    config, sizes = paper(f"lm.path={tmp_path}")
    found = lay_out(config, gpus(8, 8, num_bytes=A100), sizes)
    assert by_key(found)[SCORER] == (6, 2.0) and by_key(found)[BUILDER][0] == 2


def test_each_process_on_a_shared_gpu_may_take_its_bytes_and_a_part_of_the_rest_in_proportion():
    config, sizes = paper()
    first, *others = lay_out(config, gpus(8, num_bytes=A100), sizes).gpus
    assert first.memory_bound(first.actors[0]) is None  # it has the GPU for itself
    for gpu in others:
        bounds = [gpu.memory_bound(actor) for actor in gpu.actors]
        more = {round(bound / actor.num_bytes, 6) for bound, actor in zip(bounds, gpu.actors, strict=True)}
        assert len(more) == 1 and more.pop() > 1
        assert sum(bounds) + CONTEXT_BYTES * (len(gpu.actors) + 1) == pytest.approx(A100)


def test_a_process_keeps_to_the_part_that_it_was_started_with(monkeypatch):
    taken = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=A100))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *share: taken.append(share))
    keep_to_memory_bound()
    keep_to_memory_bound(20e9, 3)
    monkeypatch.setitem(places._memory, (SCORER, 2), 40e9)
    monkeypatch.setitem(places._options, (SCORER, 2), {"num_gpus": 0.25})
    monkeypatch.setitem(places._options, (SCORER, 3), {"num_gpus": 0.25})
    for name, value in places.place(SCORER, 2, {"A": "b"})["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    keep_to_memory_bound()
    assert taken == [(0.25, 3), (0.5, 0)]
    assert places.place(SCORER, 3, {})["runtime_env"]["env_vars"] == {}


# What nvidia-smi says of the GPUs ------------------------------------------------------------------------------------

ROWS = ["GPU-a, 30000", "GPU-b, 20000", "GPU-of-another-job, 10"]


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Two GPUs of 24 GB, and an nvidia-smi that prints the rows of `show`."""
    properties = [SimpleNamespace(uuid=uuid, total_memory=24e9) for uuid in "ab"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties[number])
    monkeypatch.setenv("PATH", str(tmp_path))

    def show(rows: Sequence[str] = ROWS) -> Node:
        lines = "\n".join(rows)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lines}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return this_node()

    return show


def test_a_plan_of_this_machine_has_the_memory_that_is_free_on_its_fullest_gpu(two_gpus, tmp_path):
    assert two_gpus().gpu_bytes == 20_000 * 2**20
    assert free_bytes(1) == 24e9  # where Ray was started with the first GPU alone
    assert two_gpus(["GPU-a, [N/A]", "GPU-b, [N/A]"]).gpu_bytes == 24e9
    (tmp_path / "nvidia-smi").unlink()
    assert this_node() == replace(two_gpus(["No devices were found"]), gpu_bytes=24e9)
