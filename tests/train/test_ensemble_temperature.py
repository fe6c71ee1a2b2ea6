"""A run that fits temperatures: the tuned retriever has its own, wherever it lies, and what loads it uses it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import EnsembleTemperature
from replug.models.local.stand_in_lm import StandInLM
from replug.models.replug_lm import ReplugLM
from tests.support.command_line import CommandLine
from tests.support.evaluating import on_run, typed

NUM_DEV = 20


@pytest.mark.slow
def test_a_run_that_fits_saves_the_temperature_with_the_tuned_retriever(
    finish: Callable[..., str], replug: CommandLine, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    printed = finish(run, "ensemble.temperature=fit", f"data.num_dev={NUM_DEV}", "train.max_steps=10")
    results = json.loads((run / "results.json").read_text())["language_modelling"]
    said = {name: results[name]["temperature"]["value"] for name in ("replug", "lsr")}
    tuned = Encoder(str(run)).temperature
    assert tuned is not None and tuned.num_texts == NUM_DEV and tuned.k == 5
    assert said["lsr"] == tuned.value != said["replug"] != 1
    assert "Headroom of replug" in " ".join(printed.split())
    assert "best document alone" in (run / "report.html").read_text()
    retriever = IndexRetriever(LocalIndex(run / "index", 1))
    assert retriever.temperature == tuned
    assert ReplugLM(StandInLM(), retriever, 5).temperature == tuned.value

    out = tmp_path / "own"
    assert replug(*typed("lm", f"out={out}", *on_run(run), "methods=[none,replug,lsr]", "k=5")).status == 0
    measured = json.loads((out / "results.json").read_text())["language_modelling"]
    assert measured["lsr"]["temperature"]["value"] == tuned.value and measured["replug"]["temperature"]["value"] == 1
    assert measured["lsr"]["bpb"]["value"] == pytest.approx(results["lsr"]["bpb"]["value"], abs=1e-6)
    assert "Headroom of lsr: " in (out / "table.md").read_text()

    fitted = tmp_path / "fitted"
    again = typed("lm", f"out={fitted}", *on_run(run), "methods=[none,replug,lsr]", "k=5", "ensemble.temperature=fit")
    assert replug(*again).status == 0
    measured = json.loads((fitted / "results.json").read_text())["language_modelling"]
    for name in ("replug", "lsr"):
        assert measured[name]["temperature"]["value"] == pytest.approx(said[name], rel=1e-2)

    ended = replug("export", run, "--out", tmp_path / "exported")
    assert ended.status == 0
    assert Encoder(str(tmp_path / "exported")).temperature == tuned


def test_a_run_without_development_texts_refuses_to_fit(replug: CommandLine, tmp_path: Path) -> None:
    ended = replug("train", "configs/debug.yaml", f"run_dir={tmp_path / 'run'}", "ensemble.temperature=fit")
    assert ended.status == 2
    assert "no development texts; prepare a set with data.num_dev" in ended.errors
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_temperature_says_how_it_came_to_be() -> None:
    assert EnsembleTemperature(1.0).origin == "as the paper"
    assert EnsembleTemperature(0.5).origin == "given"
