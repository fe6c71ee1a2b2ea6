"""The stages of a run and their seconds, by speeds measured on one machine, against sums by hand."""

from pathlib import Path

import pytest

from replug.config.load import config_to_yaml, load_config
from replug.models import ensemble
from replug.planning.model_sizes import ModelSize, transformer
from replug.planning.pace import Split
from replug.planning.stages import (
    HELDOUT,
    INDEX,
    LABELS,
    TAKING_TURNS,
    TRAINING,
    TUNED,
    Counts,
    Speeds,
    Stage,
    on_processors,
    timed_stages,
)
from replug.train.outlook import RunStages
from replug.train.run_dir import CheckpointMark, RunDirectory
from tests.support.command_line import ROOT

COUNTS = Counts(documents=1000, queries=100, dev=20, heldout=40)
PAIR, DOCUMENT, TRAINED = 0.1, 0.01, 0.03
ENCODER: ModelSize = transformer(12, 768, 3072, 12, 1)


def stages(config: str, *keys: str, pair: float | None = PAIR, split: Split = TAKING_TURNS) -> list[Stage]:
    models = ["retriever.path=stand_in", "lm.path=stand_in", "run_dir=x"]
    loaded = load_config(ROOT / f"configs/{config}.yaml", [*models, *keys])
    return timed_stages(loaded, COUNTS, ENCODER, Speeds(pair, DOCUMENT, TRAINED), split)


def test_a_live_run_takes_turns_with_the_lm_and_waits_for_its_refreshes() -> None:
    keys = ["data.context_tokens=64", "data.document_tokens=64", "train.batch_size=8", "retrieve.k=4", "evaluate.k=5"]
    found = stages("debug", *keys, "train.max_steps=20", "refresh.every_steps=10", "refresh.lag_steps=0")
    assert [stage.name for stage in found] == [INDEX, TRAINING, TUNED, HELDOUT]
    index, training, tuned, heldout = (stage.seconds for stage in found)
    assert index == tuned == pytest.approx(1000 * DOCUMENT)
    step = 8 * 4 * PAIR + 3 * 8 * (1 + 4) * TRAINED + 8 * TRAINED  # scores, gradient, and queries to search with
    development = 20 * 5 * (1 + 2) * PAIR
    assert training == pytest.approx(20 * step + 1000 * DOCUMENT + development)
    assert heldout == pytest.approx(40 * (1 + 2 * 5) * PAIR)
    assert [stage.pairs for stage in found] == [0, 20 * 8 * 4 + 20 * 5 * (1 + 2), 0, 40 * (1 + 2 * 5)]


def test_on_several_cores_the_lm_scores_beside_the_trainer() -> None:
    keys = ["data.context_tokens=64", "data.document_tokens=64", "train.batch_size=8", "retrieve.k=4", "evaluate.k=5"]
    keys += ["train.max_steps=20", "refresh.every_steps=10", "refresh.lag_steps=0"]
    training = stages("debug", *keys, split=on_processors(2))[1].seconds
    slower = max(8 * 4 * PAIR, 3 * 8 * (1 + 4) * TRAINED + 8 * TRAINED)
    assert training == pytest.approx(20 * slower + 1000 * DOCUMENT + 20 * 5 * (1 + 2) * PAIR)
    assert on_processors(1) == TAKING_TURNS


def mine(*keys: str, **more: float | None) -> list[Stage]:
    files = [f"data.{name}={name}.jsonl" for name in ("corpus", "queries", "dev", "heldout")]
    shape = ["data.context_tokens=64", "data.document_tokens=64", "train.batch_size=10", "evaluate.k=5"]
    return stages("own_data", *files, *shape, "label.dense=3", "label.bm25=1", "train.epochs=2", *keys, **more)


def test_a_training_on_own_labels_scores_each_pair_once_and_can_leave_documents_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = "retriever.train=query", "ensemble.temperature=fit"
    assert mine(*keys)[3].pairs == 0  # of 20 development texts no temperature is fitted
    monkeypatch.setattr(ensemble, "MIN_TEXTS", 20)
    found = mine(*keys)
    assert [stage.name for stage in found] == [INDEX, LABELS, TRAINING, TUNED, HELDOUT]
    seconds = [stage.seconds for stage in found]
    assert seconds[1] == pytest.approx((120 * 4 + 20) * PAIR) and "scores 4 candidates" in found[1].work
    # Candidates once, and 20 steps of 10 queries.
    assert seconds[2] == pytest.approx(120 * 4 * TRAINED + 20 * 3 * 10 * TRAINED)
    fitting = 20 * (5 - 3) + 20 * 5  # development texts; three of the five nearest documents are scored already
    assert found[3].pairs == fitting and seconds[3] == pytest.approx(fitting * PAIR)


def test_times_that_follow_from_an_lm_of_unknown_speed_are_not_made_up() -> None:
    stages = mine("train.labels=labels", "ensemble.temperature=1", pair=None)
    found = {stage.name: stage.seconds for stage in stages}
    assert list(found) == [TRAINING, INDEX, TUNED, HELDOUT]
    assert found[HELDOUT] is None and found[TRAINING] is not None and found[INDEX] is not None


def test_a_run_without_held_out_texts_ends_with_its_training() -> None:
    assert [stage.name for stage in mine("evaluate.heldout=false")] == [INDEX, LABELS, TRAINING]


def test_a_resumed_run_on_its_own_labels_has_its_training_before_it(tmp_path: Path) -> None:
    files = [f"data.{name}={name}.jsonl" for name in ("corpus", "queries", "dev", "heldout")]
    keys = ["retriever.path=stand_in", "lm.path=stand_in", f"run_dir={tmp_path}", *files]
    config, run = load_config(ROOT / "configs/own_data.yaml", keys), RunDirectory(tmp_path)
    names = [INDEX, LABELS, TRAINING, INDEX, HELDOUT]
    found = [Stage(name, "", pairs=8, steps=40) for name in names]
    assert RunStages(config, run)._left(found, 40) == found
    published = tmp_path / "index/v000000"
    published.mkdir(parents=True)
    (published / "manifest.json").touch()
    assert RunStages(config, run)._left(found, 40) == found[1:]
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    run.checkpoints.mkdir()
    run.mark(CheckpointMark(run.checkpoint(10), 10, (), "a"))
    assert RunStages(config, run)._left(found, 40) == [Stage(TRAINING, "", pairs=6, steps=30), *found[-2:]]
