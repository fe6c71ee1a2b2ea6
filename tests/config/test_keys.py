"""Keys: their descriptions, defaults and bounds, and those that a resumed run may change."""

from typing import get_args

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import RULED, keys_of
from replug.config.load import inputs_of, load_config
from replug.config.rules import check_rules
from replug.config.schema import Config, LMConfig, RetrieverConfig

KEYS = {key.path: key for of in (EvaluationConfig, Config) for key in keys_of(of)}
NUMBERS = {key.path: key for key in KEYS.values() if {int, float} & {key.kind, *get_args(key.kind)}}


def test_a_value_out_of_bounds_is_refused_with_what_was_expected():
    of_runs = {key.path for key in keys_of(Config)}
    for path in (path for path, key in NUMBERS.items() if key.bounds is not RULED):
        config = filled(Config if path in of_runs else EvaluationConfig)
        name, _, key_name = path.rpartition(".")
        setattr(getattr(config, name) if name else config, key_name, -1)
        with pytest.raises(UserError, match=rf"^{path} is -1; expected {KEYS[path].bounds.value}$"):
            check_rules(config)


def filled(of: type) -> Config | EvaluationConfig:
    parts = {"retriever": RetrieverConfig(path="r"), "lm": LMConfig(path="l")}
    return Config(**parts, run_dir="d") if of is Config else EvaluationConfig(**parts, out="d", methods=["none"])


def test_a_resumed_run_may_change_where_it_runs_and_not_what_it_computes():
    free = {path for path, known in KEYS.items() if known.resumable}
    assert {"run_dir", "out", "lm.url", "ray.address", "checkpoint.every_steps", "resources.train"} <= free
    fixed = {"seed", "train.batch_size", "lm.path", "data.source", "index.kind", "refresh.lag_steps"}
    assert not fixed & free
    stored = inputs_of(load_config("configs/debug.yaml"))
    assert inputs_of(load_config("configs/debug.yaml", ["resources.score=3", "run_dir=elsewhere"])) == stored
    assert inputs_of(load_config("configs/debug.yaml", ["train.lr=0.5"])) != stored
