"""Keys, methods and refreshes: how they are read, what a resumed run may change, and what is refused by which name."""

from pathlib import Path
from typing import get_args

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import RULED, keys_of
from replug.config.load import inputs_of, load_config, load_evaluation_config
from replug.config.methods import Method, meaningful_comparisons, parse_methods
from replug.config.refresh_policy import RefreshPolicy
from replug.config.rules import check_rules
from replug.config.schema import Config, LMConfig, RetrieverConfig
from tests.support.command_line import ROOT

DEBUG = ROOT / "configs/debug.yaml"


@pytest.mark.parametrize("schema", [Config, EvaluationConfig])
def test_a_value_out_of_bounds_is_refused_with_what_was_expected(schema: type) -> None:
    numbers = [known for known in keys_of(schema) if {int, float} & {known.kind, *get_args(known.kind)}]
    for known in numbers:
        if known.bounds is RULED:
            continue
        parts = {"retriever": RetrieverConfig(path="r"), "lm": LMConfig(path="l")}
        config = Config(**parts, run_dir="d") if schema is Config else schema(**parts, out="d", methods=["none"])
        section, _, name = known.path.rpartition(".")
        setattr(getattr(config, section) if section else config, name, -1)
        with pytest.raises(UserError, match=rf"^{known.path} is -1; expected {known.bounds.value}$"):
            check_rules(config)


def test_a_resumed_run_may_change_where_it_runs_and_not_what_it_computes() -> None:
    free = {known.path for schema in (EvaluationConfig, Config) for known in keys_of(schema) if known.resumable}
    assert {"run_dir", "out", "lm.url", "ray.address", "checkpoint.every_steps", "resources.train"} <= free
    assert not {"seed", "train.batch_size", "lm.path", "data.source", "index.kind", "refresh.lag_steps"} & free
    stored = inputs_of(load_config(DEBUG))
    assert inputs_of(load_config(DEBUG, ["resources.score=3", "run_dir=elsewhere"])) == stored
    assert inputs_of(load_config(DEBUG, ["train.lr=0.5"])) != stored


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (RefreshPolicy(10, 3, 30, 40), [10, 20, 30]),
        (RefreshPolicy(10, 10, 30, 40), [10, 20]),  # one begun at 30 would be adopted at 40, after the last step
        (RefreshPolicy(10, 0, 30, 31), [10, 20, 30]),
        (RefreshPolicy(50, 1, 150, 40), []),
    ],
)
def test_a_refresh_starts_at_every_multiple_that_leaves_time_to_adopt_it(
    policy: RefreshPolicy, steps: list[int]
) -> None:
    assert [step for step in range(policy.max_steps) if policy.starts_at(step)] == steps
    assert policy.num_starts == len(steps)


# Methods --------------------------------------------------------------------------------------------------------------

RETRIEVERS = {"replug": "a", "lsr": "b"}


def test_every_form_of_a_method_is_read() -> None:
    expected = [
        (Method("none", "none", 0, False), False),
        (Method("random@3", "random", 3, False), False),
        (Method("bm25/softmax", "bm25", 10, False, "softmax"), True),
        (Method("replug", "replug", 10, False), True),
        (Method("lsr/posterior", "lsr", 10, False, "posterior"), True),
        (Method("replug@5/concat", "replug", 5, True), False),
        (Method("genread", "genread", 1, False), False),
        (Method("untuned@3/even", "replug", 3, False, "even"), False),
        (Method("tuned/concat", "lsr", 10, True), False),
    ]
    methods = parse_methods([method.name for method, _ in expected], 10, RETRIEVERS)
    assert [(method, method.is_weighted) for method in methods] == expected
    [own] = parse_methods(["tuned"], 10, {**RETRIEVERS, "tuned": "c"})
    assert own.source == "tuned"  # not a synonym of lsr
    with pytest.raises(UserError, match="methods: tuned is unknown"):
        parse_methods(["tuned"], 10, {"replug": "a"})


def test_comparisons_are_with_the_first_and_with_methods_that_differ_in_one_thing() -> None:
    def compared(*names: str) -> list[str]:
        pairs = meaningful_comparisons(parse_methods([*names], 10, RETRIEVERS))
        return [f"{method} - {other}" for other, method in pairs if other != "none"]

    posterior = "replug/posterior", "lsr/posterior"
    of_posterior = ["replug/posterior - replug", "lsr/posterior - lsr", "lsr/posterior - replug/posterior"]
    assert compared("none", "random", "replug", "lsr", *posterior) == [
        *("replug - random", "lsr - random", "lsr - replug"),
        *of_posterior,
    ]
    assert compared("none", "replug@1", "replug@5", "replug") == ["replug@5 - replug@1", "replug - replug@5"]
    assert compared("none", "replug", "replug@10/concat", "lsr@1") == ["replug@10/concat - replug"]
    assert compared("lsr", "replug@2/even", "none") == ["replug@2/even - lsr", "none - lsr", "none - replug@2/even"]


# Contradictions -------------------------------------------------------------------------------------------------------

EVALUATION = "evaluation: language_modelling\nout: x\nmethods: [none]\nlm: {path: stand_in}\ntexts: {path: stand_in}\n"

ROWS = "data.train=q data.heldout=h data.source=null"
STORE = f"{ROWS} label.bm25=4 data.corpus=lance:///x?table=a"
OTHER_STORE = "data.corpus is a URL of {}://; expected qdrant://, postgresql://"
# Overrides of a training, and what the message names.
OF_TRAINING = {
    "loss.contrastive=1 train.micro_batches=2": "train.micro_batches is 2",
    "train.epochs=2": "train.epochs is 2",
    "train.patience=1": "train.patience is 1",
    "train.labels=x resources.train=2": "resources.train is 2",
    "data.num_dev=5 data.query_share=0.6 data.heldout_share=0.4": "for data.num_dev is 1.1",
    "ensemble.temperature=fit": "data.num_dev is 0",
    "evaluate.heldout=false": "evaluate.heldout is False",
    "refresh.every_steps=10 refresh.lag_steps=11": "refresh.lag_steps is 11",
    "lm={path: x}": "lm.path=VALUE",
    "retriever.query_path=DIR ": "retriever.query_path='\"DIR \"'",
    "data.queries=q": "data.queries: unknown key",
    "lr=3": "did you mean train.lr?",
    "train.labels=x train.max_steps=16 train.label_steps=16": "train.label_steps is 16",
    f"{STORE} index.kind=sq8": "index.kind is sq8, but the store of data.corpus is the index; expected flat_fp16",
    f"{STORE} train.labels=auto": "label.bm25 is 4, but the store of data.corpus finds",
    f"{ROWS} data.corpus=milvus://me:secret@h?collection=a": OTHER_STORE.format("milvus"),
    f"{ROWS} data.corpus=http://me:secret@h:6333": OTHER_STORE.format("http"),
    f"{ROWS} data.corpus=chroma://h/secret": OTHER_STORE.format("chroma"),
}
OF_EVALUATIONS = {
    "retrievers.none=x": "retrievers.none",
    "questions.query=x": "questions.query is 'x'",
    "methods=[]": "methods is empty",
    "methods=[none,replug]": "retriever.path=DIR",
    "methods=[none,random]": "data.corpus is missing",
    "methods=[random/softmax]": "methods: random/softmax",
    "methods=[replug/sum]": "methods: replug/sum",
    "methods=[bm25@0]": "methods: bm25@0",
    "methods=[genread@2]": "methods: genread@2",
    "methods=[none/posterior]": "methods: none/posterior",
    "methods=[contriever]": "methods: contriever is unknown",
    "methods=[none,bm25,none]": "methods names none twice",
    "evaluation=internet_qa methods=[replug@3]": "methods: replug@3 is unknown",
    "evaluation=internet_qa methods=[gold@3]": "methods: gold@3",
    "evaluation=internet_qa methods=[poe@0]": "methods: poe@0",
}


@pytest.mark.parametrize("overrides", [*OF_TRAINING, *OF_EVALUATIONS])
def test_a_contradiction_is_refused_by_its_key(overrides: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.yaml").write_text(EVALUATION)
    given = [overrides] if "{" in overrides or overrides.endswith(" ") else overrides.split()
    with pytest.raises(UserError) as refused:
        if overrides in OF_TRAINING:
            load_config(DEBUG, given)
        else:
            load_evaluation_config(tmp_path / "evaluation.yaml", given)
    assert {**OF_TRAINING, **OF_EVALUATIONS}[overrides] in str(refused.value) and "secret" not in str(refused.value)
