"""What a cluster must have room for, and who gets what of it."""

import pytest

from replug.cluster.layout import ROLES, Need, Node, lay_out, needs, num_ranks, shortage, trains_on_gpu
from replug.cluster.ray_cluster import _require_room
from replug.configs.errors import UserError
from replug.configs.load import load_config
from replug.configs.schema import Config, ScoreConfig, SwapMode

NEEDS = [Need("index.num_shards", 1), Need("index.num_builders", 2), Need("lm.num_replicas", 4, at_least=1)]


def cpus(count: int) -> list[Node]:
    return [Node("here", count, 0)]


def configured(*overrides: str) -> Config:
    return load_config("configs/debug.yaml", overrides)


def by_key(config: Config | ScoreConfig, roles: tuple = ROLES, on_gpu: bool = False) -> dict[str, tuple[int, float]]:
    return {need.key: (need.count, need.gpus) for need in needs(config, roles, on_gpu)}


def test_one_scorer_is_enough_to_begin_and_the_others_are_said_to_join_later(capsys):
    _require_room("ray.address", cpus(4), NEEDS)
    assert "room for all but 3 scorers, which join later" in capsys.readouterr().err
    _require_room("ray.address", cpus(7), NEEDS)
    assert capsys.readouterr().err == ""


def test_without_room_for_one_scorer_and_the_index_the_numbers_are_named():
    expected = r"ray.address: the cluster has 3 CPUs and 0 GPUs on 1 nodes, but the actors need at least 4 CPUs"
    with pytest.raises(UserError, match=expected) as error:
        _require_room("ray.address", cpus(3), NEEDS)
    assert "index.num_shards + index.num_builders + lm.num_replicas" in str(error.value)


def test_every_trainer_rank_needs_room():
    wanted = needs(configured("resources.train=4"), ROLES, False)
    assert "resources.train" in str(shortage(cpus(3), wanted))
    assert shortage(cpus(6), wanted) is None


def test_an_lm_on_a_server_needs_no_room():
    _require_room("ray.address", cpus(3), NEEDS[:2])
    with pytest.raises(UserError, match="need at least 3 CPUs"):
        _require_room("ray.address", cpus(2), NEEDS[:2])


def test_scorers_builders_and_searchers_are_counted_and_each_command_counts_its_own():
    config = configured("lm.num_replicas=4", "index.num_shards=3", "index.num_builders=2", "resources.train=2")
    index = {"index.num_shards": (3, 0.0), "index.num_builders": (2, 0.0)}
    assert by_key(config) == {"resources.train": (1, 0.0), **index, "lm.num_replicas": (4, 0.0)}
    assert by_key(config, ("index",)) == index
    assert by_key(ScoreConfig(lm=config.lm)) == {"lm.num_replicas": (4, 0.0)}
    assert by_key(config, ()) == {}


def test_without_weights_of_an_lm_no_scorers_are_counted():
    config = configured("lm.path=null", "lm.url=http://127.0.0.1:1/v1", "lm.model=m")
    assert by_key(config) == {"index.num_shards": (1, 0.0), "index.num_builders": (1, 0.0)}


def test_blue_green_counts_the_searchers_of_two_versions():
    config = configured("index.num_shards=3")
    config.index.swap = SwapMode.blue_green
    assert by_key(config)["index.num_shards"] == (6, 0.0)


def test_auto_gives_most_of_eight_gpus_to_the_lm_and_counts_every_place():
    config = lay_out(configured("resources.train=auto", "resources.score=auto", "resources.index=auto"), 8)
    assert by_key(config, on_gpu=True) == {
        "resources.train": (1, 1.0),
        "index.num_shards": (1, 0.5),
        "index.num_builders": (1, 0.5),
        "lm.num_replicas": (6, 1.0),
    }
    assert shortage([Node("a", 16, 8)], needs(config, ROLES, True)) is None


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8, 16, 64])
def test_auto_fits_whatever_there_is(gpus):
    config = lay_out(configured("resources.train=auto", "resources.score=auto", "resources.index=auto"), gpus)
    nodes = [Node(str(node), 64, min(8, gpus)) for node in range(-(-gpus // 8))]
    wanted = needs(config, ROLES, True)
    assert shortage(nodes, wanted) is None
    assert sum(need.count * need.gpus for need in wanted) == gpus


def test_auto_takes_as_many_ranks_as_divide_the_batch():
    config = configured("resources.train=auto", "train.batch_size=12")
    assert num_ranks(lay_out(config, 64)) == 6
    assert num_ranks(lay_out(configured("resources.train=auto", "train.batch_size=7"), 16)) == 1
    assert lay_out(config, 1).resources.train == 0.25


def test_a_large_lm_takes_several_gpus_for_each_replica():
    config = lay_out(configured("resources.score=6", "lm.gpus_per_replica=2"), 8)
    assert (config.lm.num_replicas, config.lm.gpus_per_replica) == (3, 2)
    with pytest.raises(UserError, match=r"resources.score is 1, less than the 2 GPUs of lm.gpus_per_replica"):
        lay_out(configured("resources.score=1", "lm.gpus_per_replica=2"), 8)


def test_without_gpus_numbers_are_of_processes_and_a_share_is_refused():
    config = lay_out(configured("resources.train=2", "resources.score=3", "resources.index=2"), 0)
    assert (num_ranks(config), config.lm.num_replicas, config.index.num_builders) == (2, 3, 2)
    with pytest.raises(UserError, match=r"resources.score is 0.5, a share of a GPU, but the cluster has no GPU"):
        lay_out(configured("resources.score=0.5"), 0)


def test_what_resources_leaves_open_stays_as_the_keys_say():
    config = configured("lm.num_replicas=3", "index.num_builders=2")
    assert lay_out(config, 0) == config
    assert lay_out(config, 8) == config


def test_two_gpus_of_one_replica_must_lie_on_one_node():
    wanted = [Need("lm.num_replicas", 1, 2.0)]
    assert "0 of 1 actors of lm.num_replicas, each 2 GPU find room" in str(
        shortage([Node("a", 8, 1), Node("b", 8, 1)], wanted)
    )
    assert shortage([Node("a", 8, 1), Node("b", 8, 2)], wanted) is None


def test_a_share_must_lie_on_one_gpu():
    wanted = [Need("index.num_builders", 3, 0.6)]
    assert "2 of 3 actors" in str(shortage([Node("a", 8, 2)], wanted))


def test_a_trainer_that_must_have_a_gpu_says_where_there_is_none():
    config = configured("train.accelerator=gpu")
    with pytest.raises(UserError, match=r"train.accelerator is gpu, but torch finds no GPU"):
        trains_on_gpu(config, has_gpu=False)
    assert trains_on_gpu(config, has_gpu=True)
    assert not trains_on_gpu(configured("train.accelerator=cpu"), has_gpu=True)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("resources.train=0", "resources.train is 0; expected a whole number above 0"),
        ("resources.score=1.5", "resources.score is 1.5; expected a whole number above 0, a share"),
        ("resources.index=most", "resources.index is most; expected a number or auto"),
        ("resources.train=3", "train.batch_size is 8; expected a multiple of ranks x micro_batches"),
        ("train.micro_batches=3", "train.batch_size is 8; expected a multiple of ranks x micro_batches"),
        ("train.micro_batches=0", "train.micro_batches is 0; expected a number above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_their_key(override, expected):
    with pytest.raises(UserError) as error:
        configured(override)
    assert expected in str(error.value)
