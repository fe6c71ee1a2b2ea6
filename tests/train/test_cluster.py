"""What a cluster that is joined must have room for."""

import pytest

from configs.errors import UserError
from configs.schema import ScoreConfig, Swap
from train.cluster import _require_room, actors_needed

ACTORS = {"lm.num_replicas": 4, "index.num_shards": 1, "index.num_builders": 2}


def test_one_scorer_is_enough_to_begin_and_the_others_are_said_to_join_later(capsys):
    _require_room(4, ACTORS)
    assert "room for all but 3 of 4 scorers, which join later" in capsys.readouterr().err
    _require_room(7, ACTORS)
    assert capsys.readouterr().err == ""


def test_without_room_for_one_scorer_and_the_index_the_numbers_are_named():
    with pytest.raises(UserError, match=r"has 3 CPUs, but the actors need 4 \(lm.num_replicas \+ index.num_shards"):
        _require_room(3, ACTORS)


def test_an_lm_on_a_server_needs_no_room():
    _require_room(3, {"index.num_shards": 1, "index.num_builders": 2})
    with pytest.raises(UserError, match="need 3"):
        _require_room(2, {"index.num_shards": 1, "index.num_builders": 2})


def test_scorers_builders_and_searchers_are_counted(debug_config):
    debug_config.lm.num_replicas, debug_config.index.num_shards, debug_config.index.num_builders = 4, 3, 2
    assert actors_needed(debug_config) == {"lm.num_replicas": 4, "index.num_shards": 3, "index.num_builders": 2}


def test_without_weights_of_an_lm_no_scorers_are_counted(debug_config):
    debug_config.lm.path = None
    assert actors_needed(debug_config) == {"index.num_shards": 1, "index.num_builders": 1}
    assert actors_needed(ScoreConfig(lm=debug_config.lm)) == {}


def test_blue_green_counts_the_searchers_of_two_versions(debug_config):
    debug_config.index.swap, debug_config.index.num_shards = Swap.blue_green, 3
    assert actors_needed(debug_config)["index.num_shards"] == 6
