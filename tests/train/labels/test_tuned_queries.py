"""Which earlier trainings may give candidates: those whose documents are the labelled retriever's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.models.build import load_encoder
from replug.train.labels.labelling import load_tuned_queries
from replug.train.run_dir import RunDirectory
from replug.train.trained_weights import save_retriever
from tests.support.command_line import ROOT


def config_with(run: Path | None) -> Config:
    config = load_config(ROOT / "configs/debug.yaml")
    return replace(config, label=replace(config.label, tuned=2, tuned_path=str(run) if run else None))


def save_run(run: Path, side: TrainedSide, moved_documents: bool = False) -> None:
    """A run whose queries were tuned by a step."""
    tuned, documents = (load_encoder(config_with(None).retriever) for _ in range(2))
    with torch.no_grad():
        for encoder in (tuned, *([documents] if moved_documents else [])):
            next(encoder.parameters()).add_(1.0)
    folder = RunDirectory(run).retriever
    save_retriever(folder, tuned, side, documents if side is TrainedSide.query else None)


def test_queries_of_a_run_are_loaded_beside_the_documents_they_search(tmp_path: Path) -> None:
    save_run(tmp_path, TrainedSide.query)
    untuned = load_encoder(config_with(None).retriever)
    tuned = load_tuned_queries(config_with(tmp_path), untuned)
    assert tuned is not None
    assert not torch.equal(tuned.encode_query(["red boat"]), untuned.encode_query(["red boat"]))
    assert torch.equal(tuned.encode_document(["red boat"]), untuned.encode_document(["red boat"]))
    assert load_tuned_queries(config_with(None), untuned) is None


@pytest.mark.parametrize(
    ("side", "moved", "said"),
    [
        (TrainedSide.both, False, "holds no queries tuned alone; expected the run directory of a training with"),
        (TrainedSide.query, True, "encoded by another encoder than retriever.path"),
    ],
)
def test_another_runs_queries_are_refused(tmp_path: Path, side: TrainedSide, moved: bool, said: str) -> None:
    save_run(tmp_path, side, moved)
    config = config_with(tmp_path)
    with pytest.raises(UserError, match=said):
        load_tuned_queries(config, load_encoder(config.retriever))
