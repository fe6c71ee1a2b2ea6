"""Labels as sentence-transformers' `DistillKLDivLoss` takes them: Parquet with a column for each passage.

    query, passage_1, …, passage_K, label (the K teacher scores)

Passages stand in the candidates' order. That loss divides both sides by its temperature before the softmax, so a score
is gamma * z / beta: with `temperature=gamma` and `similarity_fct=pairwise_cos_sim` the teacher is Q and the student P_R
(REPLUG, section 4), and the loss ours times gamma².
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replug.data.labels import Labels, write_labels
from replug.data.store import CorpusStore
from replug.train.labels.targets import document_scores
from replug.train.module import LossSettings


def write_distill_kl(path: Path, labels: Labels, corpus: CorpusStore, loss: LossSettings) -> None:
    """The training texts, a row for each."""
    passages = [f"passage_{number}" for number in range(1, labels.origin.num_candidates + 1)]
    texts = [(name, pa.string()) for name in ("query", *passages)]
    write_labels(path, _rows(labels, corpus, loss, passages), pa.schema([*texts, ("label", pa.list_(pa.float32()))]))


def _rows(labels: Labels, corpus: CorpusStore, loss: LossSettings, passages: list[str]) -> Iterator[dict[str, Any]]:
    scores = document_scores(labels.texts("queries"), loss.lm_score) * loss.gamma / loss.beta
    for row, of in zip(labels.rows("queries"), scores, strict=True):
        texts = corpus.texts(np.array(row["doc_rows"]))
        yield {"query": row["context"], **dict(zip(passages, texts, strict=True)), "label": of}
