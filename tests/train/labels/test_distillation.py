"""The export of labels, and four kinds of models that `examples/train_on_labels.py` trains on it."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn.functional import kl_div

from replug.config.load import load_config
from replug.data.labels import Labels
from replug.data.store import PreparedSet
from replug.models.packaged import resolve_encoder_path
from replug.models.preparing import prepared_set
from replug.train.development import document_scores
from replug.train.labels import distill_kl_rows
from tests.support.command_line import ROOT
from tests.support.labels import write_stand_in_labels

EXAMPLE = runpy.run_path(str(ROOT / "examples/train_on_labels.py"))
NUM_DOCUMENTS = 5
Labelled = tuple[PreparedSet, Labels, Dataset]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Labelled:
    """A prepared set, its labels by the stand-in LM, and their export."""
    folder = tmp_path_factory.mktemp("labelled")
    keys = [f"label.dense={NUM_DOCUMENTS}", "data.num_queries=8", "loss.gamma=0.1", "loss.beta=0.08"]
    config = load_config(ROOT / "configs/debug.yaml", [*keys, f"run_dir={folder}/run"])
    data = prepared_set(config, folder / "set")
    labels = write_stand_in_labels(folder / "labels", config, data)
    return data, labels, distill_kl_rows(labels, data.corpus, config.loss)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_the_export_has_every_text_with_its_documents_and_the_lms_distribution(labelled: Labelled) -> None:
    data, labels, table = labelled
    scores = labels.scores("queries")
    q = softmax(document_scores(scores, "mean_logprob") / 0.08)
    passages = [f"passage_{n}" for n in range(1, NUM_DOCUMENTS + 1)]
    assert table.column_names == ["query", *passages, "label"] and len(table) == len(data.queries)
    for at, (row, example) in enumerate(zip(table, data.queries.examples(), strict=True)):
        assert row["query"] == example.context
        assert [row[name] for name in passages] == data.corpus.texts(scores.retrieved.doc_rows[at])
        np.testing.assert_allclose(softmax(np.array(row["label"]) / EXAMPLE["GAMMA"]), q[at], atol=1e-5)


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


@pytest.mark.parametrize("kind", ("bi_encoder", "reranker", "splade", "colbert"))
def test_each_kind_of_model_learns_the_lms_distribution_over_the_documents(
    kind: str, labelled: Labelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a trainer writes a card, for which it asks the hub
    torch.manual_seed(0)
    table = labelled[-1]
    settings = {"max_steps": 25, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "report_to": "none"}
    settings |= {"output_dir": str(tmp_path), "save_strategy": "no", "disable_tqdm": True}
    trainer = EXAMPLE[kind](resolve_encoder_path("stand_in"), table, **settings)
    trainer.train()
    assert divergence(trainer.model, table) < 0.5 * divergence(None, table)
