"""Stages, LM calls and hours of a run, and LM calls of evaluations, against sums by hand; and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import config_to_yaml, load_config, load_evaluation_config
from replug.config.schema import Config
from replug.data.shards import prepared_folder
from replug.models import ensemble
from replug.planning import estimate
from replug.planning.accelerators import ACCELERATORS, find_accelerator, parse_devices
from replug.planning.estimate import pair_flop, plan_training
from replug.planning.evaluations import count_examples, plan_evaluation
from replug.planning.model_sizes import encoder_size, lm_size
from replug.planning.stages import (
    HELDOUT,
    INDEX,
    LABELS,
    QUESTIONS_MADE,
    TRAINING,
    TUNED,
    Counts,
    Stage,
    lengths,
    run_stages,
)
from replug.train.outset import stages_left
from replug.train.run_dir import CheckpointMark, RunDirectory
from tests.support.command_line import ROOT

COUNTS = Counts(documents=1000, queries=100, dev=20, heldout=40)
SPLITS = ("corpus", "train", "dev", "heldout")
SHAPE = ["data.context_tokens=64", "data.document_tokens=64", "evaluate.k=5"]
LIVE = ["train.batch_size=8", "retrieve.k=4", "train.max_steps=20", "refresh.every_steps=10", "refresh.lag_steps=0"]
OWN = [*(f"data.{name}={name}.jsonl" for name in SPLITS), "label.dense=3", "label.bm25=1", "train.epochs=2"]


def stages(config: str, *keys: str) -> dict[str, Stage]:
    models = ["retriever.path=stand_in", "lm.path=stand_in", "run_dir=x"]
    found = run_stages(load_config(ROOT / f"configs/{config}.yaml", [*models, *SHAPE, *keys]), COUNTS)
    return {stage.name: stage for stage in found}


def test_a_live_run_scores_its_steps_its_development_texts_and_its_held_out_texts() -> None:
    found = stages("debug", *LIVE)
    assert list(found) == [INDEX, TRAINING, TUNED, HELDOUT]
    assert found[TRAINING].pairs == 20 * 8 * 4 + 20 * 5 * (1 + 2)
    assert found[HELDOUT].pairs == 40 * (1 + 2 * 5)
    assert found[INDEX].documents == found[TUNED].documents == 1000


def test_a_training_on_own_labels_scores_each_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [*OWN, "train.batch_size=10", "retriever.train=query", "ensemble.temperature=fit"]
    assert stages("own_data", *keys)[TUNED].pairs == 0  # of 20 development texts no temperature is fitted
    monkeypatch.setattr(ensemble, "MIN_TEXTS", 20)
    found = stages("own_data", *keys)
    assert list(found) == [INDEX, LABELS, QUESTIONS_MADE, TRAINING, TUNED, HELDOUT]
    assert found[LABELS].pairs == 120 * 4 and found[TRAINING].steps == 20
    assert found[TUNED].pairs == 20 * (5 - 3) + 20 * 5  # three of the five nearest documents are scored already
    assert found[TUNED].documents == 0
    assert list(stages("own_data", *keys, "data.questions=null", "evaluate.heldout=false")) == [INDEX, LABELS, TRAINING]
    made = [QUESTIONS_MADE, TRAINING, INDEX, TUNED, HELDOUT]
    assert list(stages("own_data", *keys, "train.labels=labels")) == made


def test_a_resumed_run_on_its_own_labels_has_its_training_before_it(tmp_path: Path) -> None:
    keys = ["retriever.path=stand_in", "lm.path=stand_in", f"run_dir={tmp_path}", *OWN]
    config, run = load_config(ROOT / "configs/own_data.yaml", keys), RunDirectory(tmp_path)
    names = [INDEX, LABELS, QUESTIONS_MADE, TRAINING, INDEX, HELDOUT]
    found = [Stage(name, "", pairs=8, steps=40) for name in names]
    assert stages_left(config, run, found, 40) == found
    published = tmp_path / "index/v000000"
    published.mkdir(parents=True)
    (published / "manifest.json").touch()
    assert stages_left(config, run, found, 40) == found[1:]
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    run.checkpoints.mkdir()
    run.mark(CheckpointMark(run.checkpoint(10), 10, (), "a"))
    assert stages_left(config, run, found, 40) == [found[2], Stage(TRAINING, "", pairs=6, steps=30), *found[-2:]]


# Hours --------------------------------------------------------------------------------------------------------------


def planned(config: Config, gpus: str, **keys: Any) -> dict[str, Any]:
    config = replace(config, resources=replace(config.resources, **keys))
    return plan_training(config, gpus)


def seconds(plan: dict[str, Any]) -> list[float]:
    return [stage["seconds"] for stage in plan["stages"]]


def test_hours_are_the_flop_of_the_work_over_the_rates_of_its_gpus(paper: Config) -> None:
    plan = planned(paper, "8xA100", train=1, score=6, index=1)
    size, lm, encoder = lengths(paper), lm_size("gpt2-xl"), encoder_size("facebook/contriever")
    pair = pair_flop(lm, size) / (0.49 * 312e12)
    build = 36e6 * 130 * encoder.flop_per_token(130) / (0.36 * 312e12)
    index, training, tuned, heldout = seconds(plan)
    assert index == tuned == pytest.approx(build)
    step = 1280 * pair / 6  # the LM is the busiest
    assert training == pytest.approx(25_000 * step + 7 * (build - 1000 * step), rel=1e-3)
    assert heldout == pytest.approx(2000 * 21 * pair / 6 / 10, rel=1e-3) or heldout > 0
    assert plan["lm_calls"] == 25_000 * 1280 + plan["stages"][-1]["pairs"]
    assert plan["tokens"] == plan["lm_calls"] * 384


def test_roles_that_share_gpus_take_turns_on_them(paper: Config) -> None:
    """A simulation of these runs by discrete events gave 12.7 h and 13.7 h."""
    shared = planned(paper, "8xA100", train=1, score=7, index=7)
    assert shared["wall_hours"] == pytest.approx(13.0, rel=0.1)
    assert {tuple(kind["roles"]): kind["count"] for kind in shared["gpus"]} == {
        ("trainer rank",): 1,
        ("builder", "scorer", "searcher"): 7,
    }
    one = planned(replace(paper, data=replace(paper.data, num_documents=1_000_000)), "1xH200")
    assert len(one["gpus"]) == 1 and one["gpus"][0]["gb"] < one["gpus"][0]["limit_gb"]


def test_the_hours_of_a_server_are_not_made_up(paper: Config) -> None:
    keys = ["lm.path=null", "lm.url=http://127.0.0.1:9/v1", "lm.model=m", "lm.tokenizer=package:smollm2"]
    config = load_config(ROOT / "configs/paper.yaml", [*keys, "data.num_documents=1000000"])
    plan = planned(config, "2xA100")
    assert [second is None for second in seconds(plan)] == [False, True, False, True]
    assert plan["wall_hours"] is None


@pytest.mark.parametrize(
    ("keys", "gpus", "named"),
    [
        ([], "1xA10", "chunk_tokens"),  # what makes it fit
        (["resources.score=1", "resources.train=1", "resources.index=1"], "3xA10", "chunk_tokens"),
        (["lm.path=acme/lm"], "8xA100", r"lm\.path.*acme/lm"),
        (["retriever.path=acme/encoder"], "8xA100", r"retriever\.path.*acme/encoder"),
        (["data.num_documents=null"], "8xA100", "--documents"),
        ([], "8A100", "--gpus"),
        ([], "0xA100", "--gpus"),
        ([], "8xA101", "A100"),
    ],
)
def test_a_run_that_cannot_be_planned_or_does_not_fit_is_refused(keys: list[str], gpus: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        plan_training(load_config(ROOT / "configs/paper.yaml", keys), gpus)


def test_a_run_that_this_machine_does_not_hold_is_refused(paper: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 16e9}))
    with pytest.raises(UserError, match="this machine has 16 GB"):
        plan_training(paper)


# Devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA H100 NVL", None),
        ("a100_3g.20gb", None),
        ("gpu", None),
    ],
)
def test_a_card_is_known_by_its_longest_name_and_no_other_is_taken_for_it(name: str, known: str | None) -> None:
    assert find_accelerator(name) is (ACCELERATORS[known] if known else None)


def test_nodes_have_eight_gpus_unless_they_are_told() -> None:
    assert [parse_devices(text).nodes for text in ("8xA100", "64xH100", "4 x a100")] == [1, 8, 1]
    assert parse_devices("8xA100", nodes=2).nodes == 2
    for text, nodes in (("8xA100", 3), (None, 2)):
        with pytest.raises(UserError, match="--nodes"):
            parse_devices(text, nodes)


# Evaluations ---------------------------------------------------------------------------------------------------------

MODELS = ["data.source=null", "data.corpus=D.jsonl", "retriever.path=facebook/contriever", "lm.path=gpt2"]
EVALUATIONS = sorted([*ROOT.glob("configs/eval_*.yaml"), *ROOT.glob("configs/paper_tables/*.yaml")])


def config_of(name: str, *overrides: str) -> EvaluationConfig:
    path = "texts.path=T" if name == "lm" else "questions.path=Q.jsonl"
    return load_evaluation_config(ROOT / f"configs/eval_{name}.yaml", [*MODELS, path, *overrides])


@pytest.mark.parametrize(
    ("name", "methods", "calls", "tokens"),
    [
        ("lm", "[none]", 1, 256),
        ("lm", "[none,replug]", 11, 256 + 10 * 356),
        ("lm", "[replug@3,replug@2/posterior]", 7, 7 * 356),
        ("lm", "[replug@10/concat]", 1, 10 * 100 + 256),
        ("mmlu", "[none,replug]", 11, 104 + 10 * 204),
        ("open_qa", "[replug@3]", 3, 3 * (20 + 100 + 16)),
        ("popqa", "[genread]", 2, 2 * (15 + 150 + 15)),
        ("internet", "[poe@2]", 8, 8 * (150 + 20 + 4 * 25)),  # answers, and three other factors of each passage
        ("internet", "[none]", 1, 150 + 20 + 50 * 25),
        ("retrieval", "[replug]", 0, 0),
    ],
)
def test_each_method_reads_its_documents(name: str, methods: str, calls: int, tokens: int) -> None:
    config = config_of(name, "data.document_tokens=100", f"methods={methods}")
    plan = plan_evaluation(config, 7)
    assert (plan["examples"], plan["lm_calls"], plan["tokens"]) == (7, 7 * calls, 7 * tokens)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_evaluation_of_this_repository_has_a_plan(path: Path) -> None:
    own = [*MODELS, *["retrievers.lsr=facebook/contriever"] * ("  lsr:" in path.read_text())]  # of a run to come
    plan = plan_evaluation(config := load_evaluation_config(path, own), 10)
    assert (plan["lm_calls"] > 0) == (plan["tokens"] > 0) == (config.evaluation != "retrieval")


def test_examples_are_counted_in_files_else_by_keys_else_the_flag_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "?"}\n' * 7)
    path = f"questions.path={tmp_path / 'q.jsonl'}"
    assert count_examples(config_of("open_qa", path, "questions.max_questions=null"), None) == 7
    assert count_examples(config_of("open_qa", path, "questions.max_questions=5"), None) == 5
    assert count_examples(config_of("open_qa", path), 3) == 3
    assert count_examples(config_of("mmlu", "questions.max_questions=25"), None) == 25 * 57
    with pytest.raises(UserError, match=r"questions.max_questions is not set .*--examples N"):
        count_examples(config_of("open_qa", "questions.max_questions=null"), None)


def test_a_prepared_set_tells_its_texts_and_their_lengths(tmp_path: Path) -> None:
    prepared = prepared_folder(tmp_path)
    prepared.claim({"data.context_tokens": 64, "data.document_tokens": 100})
    prepared.finish([], {"counts": {"documents": 9, "queries": 5, "heldout": 50}})
    own = [*MODELS[2:], "data.source=null", f"data.prepared={tmp_path}", "methods=[none]"]
    plan = plan_evaluation(load_evaluation_config(ROOT / "configs/eval_lm.yaml", own))
    assert (plan["examples"], plan["tokens"]) == (50, 50 * 128)
