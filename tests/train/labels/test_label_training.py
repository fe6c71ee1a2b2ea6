"""A training on labels: neither Ray nor an LM at work, to the end, interrupted, stopped early, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replug.cluster.interruption import Interruption
from replug.commands.export import export
from replug.config.errors import RunError, UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.labels import Labels
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from replug.models.preparing import prepared_set
from replug.train.development import LabelledDevTexts, Watch
from replug.train.run import train
from replug.train.run_dir import RunDirectory
from replug.train.sources import LabelledBatches
from replug.train.trained_weights import encoder_of_checkpoint
from tests.support.command_line import ROOT
from tests.support.labels import LabellingLM, write_stand_in_labels
from tests.support.runs import metrics, what_must_be_equal
from tests.support.training import made_module

KEYS = (
    *("label.dense=5", "label.random=2", "data.num_queries=24", "data.num_dev=10", "data.num_heldout=10"),
    *("train.batch_size=8", "checkpoint.every_steps=2", "evaluate.heldout=false"),
)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set with development texts in set/, and its labels in labels/."""
    folder = tmp_path_factory.mktemp("labelled")
    keys = [*KEYS[:5], f"run_dir={folder}/run", f"data.out={folder}/set"]
    config = load_config(ROOT / "configs/debug.yaml", keys)
    write_stand_in_labels(folder / "labels", config, prepared_set(config, folder / "set"))
    return folder


def configured(labelled: Path, run: Path, *overrides: str) -> Config:
    keys = [*KEYS, f"train.labels={labelled}/labels", f"data.prepared={labelled}/set", "data.source=null"]
    return load_config(ROOT / "configs/debug.yaml", [*keys, f"run_dir={run}", "train.max_steps=6", *overrides])


@pytest.fixture(scope="module")
def finished(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two passes, on this process alone."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(configured(labelled, run, "train.epochs=2"))
    return run


def test_two_epochs_are_trained_and_the_weights_best_on_development_texts_are_the_result(labelled, finished):
    results = json.loads((finished / "results.json").read_text())
    measured, weights = [row["dev/bpb"] for row in metrics(finished)], results["weights"]
    assert len(measured) == weights["steps"] == 6
    assert weights["best"]["bpb"] == pytest.approx(min(weights["first"]["bpb"], *measured), rel=1e-6)
    assert weights["step"] == weights["best"]["step"]
    assert "language_modelling" not in results and (finished / "report.html").is_file()
    assert not Encoder(str(finished / "retriever")).is_pair


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Reports of all runs but the finished one without figures, which take as long as the training."""
    monkeypatch.setattr("replug.train.report._training_blocks", lambda *_: [])


@pytest.fixture
def interrupted(monkeypatch):
    """Train as if a signal came at a check: one comes before every step."""

    def train_until(config: Config, checks: int) -> None:
        left = iter(range(checks))

        def check(interruption: Interruption) -> None:
            if next(left, None) is None:
                raise RunError("interrupted")

        with monkeypatch.context() as patched, pytest.raises(RunError, match="interrupted"):
            patched.setattr(Interruption, "check", check)
            train(config)

    return train_until


def test_an_interrupted_training_goes_on_to_the_same_losses_and_weights(
    labelled, finished, tmp_path, monkeypatch, interrupted
):
    config = configured(labelled, tmp_path / "run", "train.epochs=2")
    interrupted(config, 3)
    steps, measure = [], LabelledDevTexts.measure
    monkeypatch.setattr(LabelledDevTexts, "measure", lambda dev, step: steps.append(step) or measure(dev, step))
    train(config)
    assert what_must_be_equal(tmp_path / "run") == what_must_be_equal(finished)
    assert steps in ([3, 6], [6])  # never again before the first step
    ours, other = (Encoder(str(run / "retriever")).state_dict() for run in (tmp_path / "run", finished))
    assert all(ours[name].equal(other[name]) for name in ours)


def test_training_ends_where_development_texts_get_no_better_and_a_finished_fit_is_read(labelled, tmp_path):
    keys = ("train.patience=2", "train.epochs=5", "train.lr=1.0e-12")
    config = configured(labelled, tmp_path / "run", *keys)
    weights = train(config)["weights"]
    assert weights["steps"] < 15 and weights["steps"] - weights["step"] == 6  # two epochs
    assert len(metrics(tmp_path / "run")) == weights["steps"]
    assert train(config)["weights"] == weights


def test_queries_tuned_alone_leave_the_documents_encoder_as_it_was_in_a_small_checkpoint_too(
    labelled, tmp_path, interrupted
):
    train(configured(labelled, tmp_path / "run", "retriever.train=query", "train.max_steps=2"))
    tuned, base, texts = Encoder(str(tmp_path / "run")), Encoder("stand_in"), ["mida furo", "x"]
    assert tuned.encode_document(texts).equal(base.encode_document(texts))
    begun, keys = tmp_path / "begun", ("retriever.train=query", "lora.rank=2", "train.lr=1.0e-2")
    config = configured(labelled, begun, *keys)
    interrupted(config, 3)
    export(begun, tmp_path / "exported")
    last = Encoder(str(tmp_path / "exported"))
    assert last.encode_document(texts).equal(base.encode_document(texts))
    assert not last.encode_query(texts).equal(base.encode_query(texts))
    assert (tmp_path / "exported/adapter/adapter_model.safetensors").is_file()
    newest = RunDirectory(begun).newest_checkpoint()
    assert newest is not None
    state = torch.load(newest.path, weights_only=True)
    assert len(state["untrained_sha256"]) == 64 and len(state["state_dict"]) == 8  # A and B of two layers' two
    assert encoder_of_checkpoint(config, state).untrained_sha256 == state["untrained_sha256"]
    write_stand_in_encoder(tmp_path / "other", seed=1)
    other = replace(config, retriever=replace(config.retriever, path=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"retriever.path: its weights differ from those at the start of the run"):
        encoder_of_checkpoint(other, state)


def test_documents_that_stay_as_they_are_are_embedded_once_with_the_vectors_that_every_step_would_compute(
    labelled, tmp_path
):
    config = configured(labelled, tmp_path / "run", "retriever.train=query")
    data = prepared_set(config, tmp_path / "unused")
    module = made_module(config, data)
    labels, watch, frozen = Labels(labelled / "labels"), Watch(tmp_path / "best"), module.frozen
    dev, anew = (LabelledDevTexts(config, labels, data, module.encoder, of, watch) for of in (frozen, None))
    source = LabelledBatches(config, labels, data, frozen, dev)
    batch = source.take(0).retrieved
    assert frozen is not None
    looked_up = module.similarities(batch)[0]
    assert looked_up.requires_grad
    assert dev.measure(0).bpb == pytest.approx(anew.measure(0).bpb, rel=1e-6)
    frozen.forget()
    torch.testing.assert_close(looked_up, module.similarities(batch)[0], atol=1e-6, rtol=0)


def test_labels_of_another_prompt_lm_or_set_are_refused_by_name(labelled, debug_config, tmp_path):
    with pytest.raises(UserError, match=r"too_long is 'truncate', but the set of labels in"):
        train(configured(labelled, tmp_path / "run", "lm.too_long=truncate"))

    class OtherLM(LabellingLM):
        identity = "another"

    config = configured(labelled, tmp_path / "run")
    data = prepared_set(config, tmp_path / "data")
    write_stand_in_labels(tmp_path / "labels", config, data, OtherLM())
    with pytest.raises(UserError, match=r"lm is .*, but the set of labels in .* was made with 'another'"):
        train(configured(labelled, tmp_path / "run", f"train.labels={tmp_path}/labels"))
    with pytest.raises(UserError, match=r"set_sha256 is .*, but the set of labels"):
        keys = [f"run_dir={tmp_path}/run2", f"train.labels={labelled}/labels", "evaluate.heldout=false"]
        train(load_config(ROOT / "configs/debug.yaml", keys))
