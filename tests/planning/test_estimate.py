"""Stages, LM calls and hours of a run, against sums by hand; what does not fit is refused before anything heavy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import UserError
from replug.config.load import config_to_yaml, load_config
from replug.config.schema import Config
from replug.models import ensemble
from replug.planning import estimate
from replug.planning.accelerators import ACCELERATORS, find_accelerator, parse_devices
from replug.planning.estimate import pair_flop, plan_training
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
