"""What a cluster must have room for, and who gets what of it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from replug.cluster import places
from replug.cluster.gpu_shares import ROLES, Sizes
from replug.cluster.gpus import gpu_state, keep_to_memory_bound
from replug.cluster.layout import UNKNOWN, Layout, lay_out, num_ranks
from replug.cluster.packing import BUILDER, CONTEXT_BYTES, NAMES, SCORER, SEARCHER, TRAINER, Node
from replug.cluster.ray_cluster import _lay_out, _require_same_gpus, this_node
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


def test_one_scorer_is_enough_to_begin_and_the_others_join_later():
    config = configured("lm.num_replicas=4", "index.num_builders=2")
    assert [lay_out(config, cpus(count)).num_waiting for count in (4, 7)] == [3, 0]


def test_without_room_for_one_scorer_and_the_index_the_numbers_are_named():
    config = configured("lm.num_replicas=4", "index.num_builders=2")
    with pytest.raises(UserError, match=r"ray.address: the cluster has 3 CPUs and 0 GPUs on 1 nodes, but .* 4 CPUs"):
        _lay_out("ray.address", config, cpus(3), UNKNOWN, ROLES)
    assert "(index.num_shards + index.num_builders + lm.num_replicas)" in refused(config, cpus(3))


def test_scorers_builders_and_searchers_are_counted_and_each_command_counts_its_own():
    config = configured("lm.num_replicas=4", "index.num_shards=3", "index.num_builders=2", "resources.train=2")
    index = {SEARCHER: (3, 0.0), BUILDER: (2, 0.0)}
    assert by_key(lay_out(config, cpus(99))) == {TRAINER: (1, 0.0), **index, SCORER: (4, 0.0)}
    assert by_key(lay_out(config, cpus(99), roles=["index"])) == index
    assert by_key(lay_out(config, cpus(99), roles=())) == {}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_auto_fits_whatever_there_is_and_leaves_nothing_unused(count):
    nodes = gpus(*[min(8, count)] * -(-count // 8))
    found = lay_out(configured(), nodes)
    assert sum(actor.gpus for actor in found.actors) == pytest.approx(count)
    assert found.num_waiting == 0 and all(gpu.actors for gpu in found.gpus)


def test_without_gpus_numbers_are_of_processes_and_a_share_is_refused():
    found = lay_out(configured("resources.train=2", "resources.score=3", "resources.index=2"), cpus(99)).config
    assert (num_ranks(found), found.lm.num_replicas, found.index.num_builders) == (2, 3, 2)
    reason = refused(configured("resources.score=0.5"), cpus(99))
    assert "resources.score is 0.5, a share of a GPU, but the cluster has no GPU" in reason


def test_rank_0_takes_its_gpu_on_the_commands_node_before_anybody_else():
    found = lay_out(configured("resources.train=2", "resources.score=5", "resources.index=1"), gpus(4, 4))
    assert on_gpus(found)[:2] == [["trainer rank 0"], ["trainer rank 1"]]
    nodes = [Node("a", 64, 4), Node("b", 64, 4, is_driver=True)]
    first = next(gpu for gpu in lay_out(configured(), nodes).gpus if gpu.actors and gpu.actors[0].key == TRAINER)
    assert first.node.name == "b"
    assert first in lay_out(configured(), nodes).reserved


def test_a_command_without_a_gpu_does_not_train_on_its_processor_beside_a_cluster_with_gpus():
    nodes = [Node("login", 64, 0, is_driver=True, address="10.0.0.1"), Node("worker", 64, 8)]
    reason = refused(configured(), nodes)
    assert "runs on 10.0.0.1, where rank 0 trains, and that has no GPU, but the cluster has 8" in reason
    assert "train.accelerator=cpu" in reason
    assert TRAINER not in by_key(lay_out(configured("train.accelerator=cpu"), nodes))


def test_what_ray_counts_on_the_commands_node_torch_must_see(monkeypatch):
    config = configured()
    with pytest.raises(UserError, match="Ray counts GPUs on this machine, but torch sees none"):
        _require_same_gpus(lay_out(config, gpus(2)), config, ROLES, visible=0)
    with pytest.raises(UserError, match="torch sees 2 GPUs on this machine, but Ray was started here without any"):
        _require_same_gpus(lay_out(config, cpus(9)), config, ROLES, visible=2)
    _require_same_gpus(lay_out(config, gpus(2)), config, ROLES, visible=2)
    _require_same_gpus(lay_out(config, gpus(2), roles=["index"]), config, ["index"], visible=0)


def test_two_versions_of_the_papers_vectors_lie_on_two_gpus_each_with_its_builder():
    config, sizes = paper()
    for nodes in (gpus(8, num_bytes=A100), gpus(4, 4, num_bytes=A100)):
        found = lay_out(config, nodes, sizes)
        assert on_gpus(found)[:3] == [["trainer rank 0"], ["searcher 0", "builder 0"], ["searcher 1", "builder 1"]]
        assert by_key(found)[SCORER] == (5, 1.0)
        assert found.gpus[1].num_bytes == pytest.approx(55.3e9 + 0.92e9 + CONTEXT_BYTES, rel=0.01)
        assert all(0 < gpu.num_bytes < gpu.node.gpu_limit for gpu in found.gpus)


@pytest.mark.parametrize("count", [1, 4])
def test_vectors_that_would_take_too_many_gpus_are_searched_in_host_memory(count):
    config, sizes = paper()
    found = lay_out(config, gpus(count, num_bytes=A100), sizes)
    assert by_key(found)[SEARCHER] == (1, 0.0)
    assert "the index is searched in host memory: two versions take 110.6 GB of each node" in found.notes
    assert all(gpu.num_bytes < gpu.node.gpu_limit for gpu in found.gpus)


def test_a_trainer_too_large_for_its_gpu_is_refused_with_the_keys_that_make_it_smaller():
    config, sizes = paper("resources.train=1")
    reason = refused(config, gpus(8, num_bytes=24e9), sizes)
    assert reason.startswith("resources.train: trainer rank 35.0 GB need 35.0 GB, but a GPU has 22.1 GB to give (92%")
    assert "train.gradient_checkpointing=true" in reason


def test_auto_takes_more_ranks_where_one_does_not_fit_and_the_others_take_what_is_left():
    config, sizes = paper("index.gpus_per_searcher=0")
    assert num_ranks(lay_out(config, gpus(8, num_bytes=40e9), sizes).config) == 1
    found = lay_out(config, gpus(8, num_bytes=24e9), sizes)
    assert by_key(found)[TRAINER] == (2, 1.0) and by_key(found)[SCORER] == (5, 1.0)
    assert "resources.train: trainer rank" in refused(config, gpus(2, num_bytes=8e9), sizes)


def test_blue_green_lets_builders_and_searchers_change_places():
    config, sizes = paper("index.swap=blue_green")
    found = lay_out(config, gpus(8, num_bytes=A100), sizes)
    assert on_gpus(found)[1:3] == [["searcher 0"], ["builder 0"]]
    assert [gpu.num_bytes for gpu in found.gpus[1:3]] == [pytest.approx(55.3e9, rel=0.01)] * 2  # the next version's too
    config, sizes = paper("index.swap=blue_green", "index.num_builders=2", "resources.index=2")
    assert "index.num_builders is 2; expected index.num_shards=1" in refused(config, gpus(8, num_bytes=A100), sizes)


@pytest.mark.parametrize("counts", [(8,), (4, 4)], ids=["1x8", "2x4"])
def test_roles_share_gpus_where_their_numbers_are_more_than_there_are(counts):
    total = sum(counts)
    ranks = min(8, total // 4)
    config, sizes = paper(f"resources.train={ranks}", f"resources.score={total}", f"resources.index={total}")
    found = lay_out(config, gpus(*counts, num_bytes=A100), sizes)
    kinds = [sorted(actor.key for actor in gpu.actors) for gpu in found.gpus]
    assert all(len(set(kind)) == len(kind) for kind in kinds)  # no two of a kind
    assert sum(len(kind) for kind in kinds) > 2 * total
    assert all(0 < gpu.num_bytes < gpu.node.gpu_limit and gpu.free >= 0 for gpu in found.gpus)
    assert found.num_waiting == 0 and set(found.reserved) == set(found.gpus)
    assert len({gpu.node.name for gpu in found.gpus if gpu.has(TRAINER)}) == 1
    again = lay_out(found.config, gpus(*counts, num_bytes=A100), sizes)
    assert (again.gpus, again.config) == (found.gpus, found.config)


def test_numbers_above_the_gpus_share_them_and_those_without_a_rank_come_first():
    config = configured("resources.train=1", "resources.score=2", "resources.index=3")
    assert on_gpus(lay_out(config, gpus(4))) == [
        ["trainer rank 0"],
        ["searcher 0", "builder 0", "scorer 0"],
        ["searcher 1", "builder 1", "scorer 1"],
        ["searcher 2", "builder 2"],
    ]
    alone = lay_out(configured("resources.train=1", "resources.score=4", "resources.index=1"), gpus(4))
    assert [[actor.key for actor in gpu.actors] for gpu in alone.gpus][2:] == [[SCORER]] * 2
    assert alone.reserved == alone.gpus  # else Ray puts both scorers on one GPU


def test_what_shared_gpus_do_not_hold_is_refused_with_gigabytes_and_keys():
    roles = ("resources.train=1", "resources.score=8", "resources.index=7", "train.micro_batches=1")
    config, sizes = paper(*roles, "lm.path=llama-2-13b")
    reason = refused(config, gpus(8, num_bytes=A100), sizes)
    assert reason.startswith("lm.num_replicas: scorer 2") and "and 67.6 GB are taken" in reason
    assert "resources.score" in reason


def test_each_process_on_a_shared_gpu_may_take_its_bytes_and_a_part_of_the_rest_in_proportion():
    config, sizes = paper("resources.train=2", "resources.score=8", "resources.index=8")
    for gpu in lay_out(config, gpus(8, num_bytes=A100), sizes).gpus:
        bounds = [gpu.memory_bound(actor) for actor in gpu.actors]
        more = {round(bound / actor.num_bytes, 6) for bound, actor in zip(bounds, gpu.actors, strict=True)}
        assert len(more) == 1 and more.pop() > 1
        assert sum(bounds) + CONTEXT_BYTES * (len(gpu.actors) + 1) == pytest.approx(A100)


def test_several_ranks_on_gpus_that_others_use_are_said_to_be_slow():
    for ranks, is_said in ((2, True), (1, False)):
        found = lay_out(configured(f"resources.train={ranks}", "resources.score=8", "resources.index=8"), gpus(8))
        assert any("several trainer ranks" in note for note in found.notes) == is_said


def test_a_process_keeps_to_the_part_that_it_was_started_with(monkeypatch):
    taken = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=A100))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *share: taken.append(share))
    keep_to_memory_bound()
    keep_to_memory_bound(20e9, 3)
    monkeypatch.setitem(places._memory, (SCORER, 2), 40e9)
    for name, value in places.place(SCORER, 2, 0.25, {"A": "b"})["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    keep_to_memory_bound()
    assert taken == [(0.25, 3), (0.5, 0)]
    assert places.place(SCORER, 3, 0.25, {})["runtime_env"]["env_vars"] == {}


# What nvidia-smi says of the GPUs ------------------------------------------------------------------------------------

ROWS = ["GPU-a, 30000, {mode}", "GPU-b, 20000, Default", "GPU-of-another-job, 10, Default"]


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Two GPUs of 24 GB, and an nvidia-smi that prints the rows of `show`."""
    properties = [SimpleNamespace(uuid=uuid, total_memory=24e9) for uuid in "ab"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties[number])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))

    def show(mode: str, rows: Sequence[str] = ROWS) -> Node:
        lines = "\n".join(row.format(mode=mode) for row in rows)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lines}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return this_node()

    return show


def test_a_plan_of_this_machine_has_the_memory_that_is_free_on_its_fullest_gpu(two_gpus, tmp_path):
    assert two_gpus("Default").gpu_bytes == 20_000 * 2**20
    assert gpu_state(1).free_bytes == 24e9  # where Ray was started with the first GPU alone
    assert two_gpus("Default", ["GPU-a, [N/A], [N/A]", "GPU-b, [N/A], [N/A]"]).gpu_bytes == 24e9
    (tmp_path / "nvidia-smi").unlink()
    assert this_node() == replace(two_gpus("Default", ["No devices were found"]), gpu_bytes=24e9)


def test_gpus_that_take_one_process_are_refused_before_two_are_put_there(two_gpus, tmp_path):
    config, both = configured("resources.train=0.5", "resources.index=0.5", "resources.score=1"), "Exclusive_Process"
    assert not two_gpus("Default").is_exclusive
    reason = refused(config, [two_gpus(both)])
    assert "compute mode Exclusive_Process" in reason and "trainer rank 0 and searcher 0 and builder 0" in reason
    assert "nvidia-smi -c DEFAULT" in reason
    apart = configured("resources.train=1", "resources.index=1", "lm.gpus_per_replica=0", "index.gpus_per_searcher=0")
    assert on_gpus(lay_out(apart, [two_gpus(both)])) == [["trainer rank 0"], ["builder 0"]]
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps/control").touch()  # the pipe of a server of MPS
    assert len(on_gpus(lay_out(config, [two_gpus(both)]))) == 2
