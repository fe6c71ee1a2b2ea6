"""Four kinds of models of sentence-transformers, each trained on the same labels by `examples/train_on_labels.py`."""

import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn.functional import kl_div

from replug.config.load import load_config
from replug.models.packaged import resolve_encoder_path
from replug.models.preparing import prepared_set
from replug.train.labels import distill_kl_rows
from tests.support.command_line import ROOT
from tests.support.labels import write_stand_in_labels

EXAMPLE = runpy.run_path(str(ROOT / "examples/train_on_labels.py"))
NUM_DOCUMENTS = 5


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Label texts by the stand-in LM, as `replug.label` does."""
    folder = tmp_path_factory.mktemp("labelled")
    keys = [f"label.dense={NUM_DOCUMENTS}", "data.num_queries=8", "loss.gamma=0.1", "loss.beta=0.1"]
    config = load_config(ROOT / "configs/debug.yaml", [*keys, f"run_dir={folder}/run"])
    data = prepared_set(config, folder / "set")
    return distill_kl_rows(write_stand_in_labels(folder / "labels", config, data), data.corpus, config.loss)


def divergence(model: object, labelled: Dataset) -> float:
    """Return the mean KL(LM || model) over the queries, by the model's own scores; no model: all documents alike."""
    passages = [name for name in labelled.column_names if name.startswith("passage_")]

    def scores(query: str, documents: list[str]) -> torch.Tensor:
        if model is None:
            return torch.zeros(len(documents))
        if isinstance(model, CrossEncoder):
            pairs = [(query, document) for document in documents]
            return model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
        similarities = model.similarity(model.encode_query([query]), model.encode_document(documents))[0]  # type: ignore[attr-defined]
        return similarities / EXAMPLE["GAMMA"] if type(model) is SentenceTransformer else similarities

    rows = [(row["query"], [row[name] for name in passages], torch.tensor(row["label"])) for row in labelled]
    model_scores = torch.stack([scores(query, documents).float() for query, documents, _ in rows]).log_softmax(-1)
    teacher = torch.stack([label for *_, label in rows]) / EXAMPLE["GAMMA"]
    return float(kl_div(model_scores, teacher.log_softmax(-1), log_target=True, reduction="batchmean"))


def trained(kind: str, base: str, labelled: Dataset, out: Path, steps: int, rate: float) -> object:
    torch.manual_seed(0)
    settings = {"max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": rate, "report_to": "none"}
    trainer = EXAMPLE[kind](base, labelled, output_dir=str(out), save_strategy="no", disable_tqdm=True, **settings)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("kind", ("bi_encoder", "reranker", "splade", "colbert"))
def test_each_kind_of_model_learns_the_lms_distribution_over_the_documents(
    kind: str, labelled: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a trainer writes a card, for which it asks the hub
    assert len(labelled.column_names) == NUM_DOCUMENTS + 2
    model = trained(kind, resolve_encoder_path("stand_in"), labelled, tmp_path, steps=25, rate=5e-3)
    assert divergence(model, labelled) < 0.5 * divergence(None, labelled)
