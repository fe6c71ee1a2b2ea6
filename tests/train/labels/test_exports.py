"""What others read of labels: FlagEmbedding's JSON Lines and sentence-transformers' columns, whose softmax is Q."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.models.preparing import prepared_set
from replug.train.fitting import loss_settings
from replug.train.labels.dev import document_scores
from replug.train.labels.exports import write_distill_kl, write_flagembedding
from tests.support.labels import write_stand_in_labels


@pytest.fixture
def exported(debug_config, tmp_path: Path):
    debug_config.label.dense, debug_config.label.random = 4, 1
    data = prepared_set(debug_config, tmp_path / "data")
    labels = write_stand_in_labels(tmp_path / "labels", debug_config, data)
    return data, labels, loss_settings(debug_config)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_both_exports_have_every_text_with_its_documents_and_the_lms_distribution(exported, tmp_path):
    data, labels, loss = exported
    write_flagembedding(tmp_path / "fe.jsonl", labels, data.corpus, loss)
    write_distill_kl(tmp_path / "st.parquet", labels, data.corpus, loss)
    texts = labels.texts("queries")
    q = softmax(document_scores(texts, loss.lm_score) / loss.beta)
    rows = [json.loads(line) for line in (tmp_path / "fe.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "st.parquet")
    assert table.column_names == ["query", *(f"passage_{n}" for n in range(1, 6)), "label"]
    for at, (row, window) in enumerate(zip(rows, data.queries.windows(), strict=True)):
        assert row["query"] == table["query"][at].as_py() == window.context
        documents = data.corpus.texts(texts.doc_rows[at])
        best = int(q[at].argmax())
        assert row["pos"] == [documents[best]] and sorted(row["pos"] + row["neg"]) == sorted(documents)
        scores = np.array(row["pos_scores"] + row["neg_scores"])
        np.testing.assert_allclose(softmax(scores), -np.sort(-q[at]), atol=1e-6)
        assert [table[f"passage_{n}"][at].as_py() for n in range(1, 6)] == documents
        np.testing.assert_allclose(softmax(np.array(table["label"][at].as_py()) / loss.gamma), q[at], atol=1e-5)
