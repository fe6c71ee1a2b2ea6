"""Development texts: their bits by hand, the weights that they keep, and the choice of weights by questions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.load import load_config
from replug.evals.ensemble_temperatures import ensemble_bits
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.local.stand_in_lm import StandInLM
from replug.models.replug_lm import ReplugLM
from replug.train.development import DevQuestions, DevResult, QuestionChooser, Watch, nearest
from tests.support.command_line import ROOT, CommandLine
from tests.support.evaluating import on_run, typed


@pytest.mark.parametrize(
    ("probabilities", "similarities", "k", "temperature", "expected"),
    [  # the mixture of both at every token; the first k by the similarities; the nearest alone
        ([[0.5, 0.25], [0.25, 0.5]], np.log([0.8, 0.2]) * 0.1, 2, 0.1, -math.log2(0.45) - math.log2(0.3)),
        ([[0.5], [0.25], [0.125]], [0.1, 0.9, 0.5], 1, 1.0, 2.0),
        ([[0.5], [0.125]], [0.2, 0.9], 2, 0.001, 3.0),
    ],
)
def test_the_ensembles_bits_are_those_computed_by_hand(probabilities, similarities, k, temperature, expected):
    tokens = np.log(probabilities).astype(np.float32)
    assert ensemble_bits([nearest(tokens, np.array(similarities), k)], temperature) == pytest.approx(expected, rel=1e-6)


def saving(content: str):
    """Return a function that saves weights into a folder."""

    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(content)

    return save


def test_only_better_weights_replace_the_best_and_patience_counts_the_others(tmp_path):
    watch = Watch(tmp_path / "best", patience=2)
    assert watch.chosen() is None
    for step, bpb in ((0, 1.25), (10, 1.25), (20, 1.125)):
        watch.record(DevResult(step, bpb, 1.0), saving(f"of step {step}"))
    assert (watch.first, watch.chosen()) == (DevResult(0, 1.25, 1.0), DevResult(20, 1.125, 1.0))
    assert (tmp_path / "best/weights").read_text() == "of step 20"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    watch.record(DevResult(30, 2.0, 1.0), saving("worse"))
    resumed = Watch(tmp_path / "best", patience=2)
    resumed.load_state_dict(watch.state_dict())
    resumed.record(DevResult(30, 2.0, 1.0), saving("the step it was saved at"))
    assert not resumed.is_over
    resumed.record(DevResult(40, 2.0, 1.0), saving("worse"))
    assert resumed.is_over and resumed.chosen() == resumed.best == DevResult(20, 1.125, 1.0)


def test_patience_follows_the_mean_where_the_interval_of_a_gain_chooses(tmp_path):
    watch = Watch(tmp_path / "best", patience=1)
    for step, least_gain, mrr in ((0, 0.0, 0.5), (10, -0.02, 0.53), (20, -0.01, 0.56)):
        watch.record(DevResult(step, mrr=mrr, least_gain=least_gain), saving(f"of step {step}"), mrr)
    assert not watch.is_over and watch.best.step == 0
    watch.record(DevResult(30, mrr=0.55, least_gain=0.01), saving("of step 30"), 0.55)
    assert watch.is_over and watch.best.step == 30


# The choice by questions ----------------------------------------------------------------------------------------


class Dev(DevQuestions):
    """A hundred questions whose ranks, by share of the way to the tuned weights, are told by a test."""

    def __init__(self, ranks: dict[float, float]) -> None:
        self._ranks, self.rows = ranks, np.array([], np.int64)
        self.start: torch.Tensor | None = None

    def __len__(self) -> int:
        return 100

    def reciprocal_ranks(self, encoder, frozen=None) -> np.ndarray:
        weight = next(encoder.parameters()).detach()
        self.start = weight.clone() if self.start is None else self.start
        moved = float((weight - self.start).mean())
        mean = self._ranks[min(self._ranks, key=lambda share: abs(share - moved))]
        return np.where(np.arange(100) < round(mean * 100), 1.0, 0.0)


def chooser_of(folder: Path, ranks: dict[float, float], loss: float = 0.5) -> tuple[QuestionChooser, Encoder, Watch]:
    config = load_config(ROOT / "configs/debug.yaml", ["train.max_steps=1", "run_dir=x"])
    encoder, watch = load_encoder(config.retriever), Watch(folder / "best")
    return QuestionChooser(config, Dev(ranks), encoder, None, watch, loss), encoder, watch


@pytest.mark.parametrize(
    ("ranks", "step", "share"),
    [
        ({1.0: 0.9, 0.75: 0.8, 0.5: 0.7, 0.25: 0.6}, 1, 1.0),
        ({1.0: 0.3, 0.75: 0.5, 0.5: 0.7, 0.25: 0.6}, 1, 0.5),
        ({1.0: 0.53, 0.75: 0.52, 0.5: 0.51, 0.25: 0.5}, 0, 1.0),  # three of a hundred show no gain
    ],
)
def test_weights_are_chosen_that_find_development_questions_best(ranks, step, share, tmp_path: Path) -> None:
    chooser, encoder, watch = chooser_of(tmp_path, {0.0: 0.5, **ranks})
    chooser.start()
    weight = next(encoder.parameters()).data
    before, tuned = weight.clone(), weight.add_(1.0).clone()
    chooser.end(0)
    assert weight.equal(tuned), "they come back to the bit"
    chosen = watch.chosen()
    assert chosen is not None and (chosen.step, chosen.share) == (step, share)
    saved = next(Encoder(str(tmp_path / "best")).parameters()).detach()
    torch.testing.assert_close(saved, before + (share if step else 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mrr", "loss", "is_over"), [(0.97, 0.5, True), (0.8, 0.01, True), (0.8, 0.5, False)])
def test_where_questions_leave_nothing_to_gain_training_ends_before_its_first_step(
    mrr: float, loss: float, is_over: bool, tmp_path: Path
) -> None:
    chooser, _, watch = chooser_of(tmp_path, {0.0: mrr}, loss)
    chooser.start()
    assert (watch.is_over, watch.chosen()) == (is_over, DevResult(0, mrr=mrr, share=1.0, least_gain=0.0))


# The ensemble's temperature ------------------------------------------------------------------------------------


NUM_DEV = 50  # the fewest that a temperature is fitted to


@pytest.mark.slow
def test_a_run_that_fits_saves_the_temperature_with_the_tuned_retriever(here: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed = here.finish(run, "ensemble.temperature=fit", f"data.num_dev={NUM_DEV}", "train.max_steps=10")
    results = json.loads((run / "results.json").read_text())["language_modelling"]
    temperatures = {name: results[name]["temperature"]["value"] for name in ("replug", "lsr")}
    tuned = Encoder(str(run)).temperature
    assert tuned is not None and tuned.num_texts == NUM_DEV and tuned.k == 5
    assert temperatures["lsr"] == tuned.value != 1 != temperatures["replug"]
    assert "Headroom of replug" in " ".join(printed.split())
    assert "best document alone" in (run / "report.html").read_text()
    retriever = IndexRetriever(LocalIndex(run / "index", 1))
    assert retriever.temperature == tuned
    assert ReplugLM(StandInLM(), retriever, 5).temperature == tuned.value

    out = tmp_path / "own"
    assert here(*typed("lm", f"out={out}", *on_run(run), "methods=[none,replug,lsr]", "k=5")).status == 0
    measured = json.loads((out / "results.json").read_text())["language_modelling"]
    assert measured["lsr"]["temperature"]["value"] == tuned.value and measured["replug"]["temperature"]["value"] == 1
    assert measured["lsr"]["bpb"]["value"] == pytest.approx(results["lsr"]["bpb"]["value"], abs=1e-6)
    assert "Headroom of lsr: " in (out / "table.md").read_text()

    ended = here("export", run, "--out", tmp_path / "exported")
    assert ended.status == 0
    assert Encoder(str(tmp_path / "exported")).temperature == tuned
