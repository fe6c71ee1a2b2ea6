"""Keys: their descriptions, defaults and bounds, and those that a resumed run may change."""

from typing import get_args

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import RULED, key_descriptions, keys_of
from replug.config.load import flatten, inputs_of, load_config
from replug.config.rules import check_rules
from replug.config.schema import Config, LMConfig, RetrieverConfig

KEYS = {key.path: key for of in (EvaluationConfig, Config) for key in keys_of(of)}
NUMBERS = {key.path: key for key in KEYS.values() if {int, float} & {key.kind, *get_args(key.kind)}}
NUMBERS.pop("paper.values")  # a number for each method


@pytest.mark.parametrize(
    ("schema", "required"),
    [(Config, {"run_dir", "retriever.path"}), (EvaluationConfig, {"evaluation", "out", "retriever.path"})],
)
def test_every_key_has_a_default_and_a_description(schema: type, required: set[str]) -> None:
    described = {key: (default, text) for key, default, text in key_descriptions(schema)}
    assert set(flatten(filled(schema))) <= set(described)
    assert [key for key, (_, text) in described.items() if not text] == []
    assert {key for key, (default, _) in described.items() if default == "required"} == required


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


def test_the_papers_setting_is_the_default():
    numbers = {"retrieve.k": 20, "train.batch_size": 64, "evaluate.k": 10, "data.context_tokens": 128, "k": 10}
    numbers |= {"loss.gamma": 0.1, "loss.beta": 0.1, "refresh.every_steps": 3000}
    numbers |= {"train.lr": 2e-5, "train.warmup_ratio": 0.1}
    numbers |= {f"texts.{name}_tokens": 128 for name in ("scored", "context", "query")}
    assert {path: KEYS[path].default for path in numbers} == numbers


def test_a_resumed_run_may_change_where_it_runs_and_not_what_it_computes():
    free = {path for path, known in KEYS.items() if known.resumable}
    assert {"run_dir", "out", "lm.url", "ray.address", "checkpoint.every_steps", "resources.train"} <= free
    fixed = {"seed", "train.batch_size", "lm.path", "data.source", "index.block_documents", "refresh.lag_steps"}
    assert not fixed & free
    stored = inputs_of(load_config("configs/debug.yaml"))
    assert inputs_of(load_config("configs/debug.yaml", ["lm.num_replicas=3", "run_dir=elsewhere"])) == stored
    assert inputs_of(load_config("configs/debug.yaml", ["train.lr=0.5"])) != stored
