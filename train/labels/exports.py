"""Labels as other trainers read them. Pure but for the files that it writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replug.config.schema import LossConfig
from replug.data.files import writing
from replug.data.labels import Labels, write_labels
from replug.data.store import CorpusStore
from replug.train.development import document_scores


def write_distill_kl(path: Path, labels: Labels, corpus: CorpusStore, loss: LossConfig) -> None:
    """Write the training texts for sentence-transformers' `DistillKLDivLoss`: Parquet, a column for each passage.

        query, passage_1, …, passage_K, label (the K teacher scores)

    Passages stand in the candidates' order. That loss divides both sides by its temperature before the softmax, so a
    score is gamma * z / beta: with `temperature=gamma` and `similarity_fct=pairwise_cos_sim` the teacher is Q and the
    student P_R (REPLUG, section 4), and the loss ours times gamma².
    """
    passages = [f"passage_{number}" for number in range(1, labels.origin.num_candidates + 1)]
    scores = document_scores(labels.scores("queries"), loss.lm_score.value) * loss.gamma / loss.beta

    def rows() -> Iterator[dict[str, Any]]:
        for row, of in zip(labels.rows("queries"), scores, strict=True):
            texts = corpus.texts(np.array(row["doc_rows"]))
            yield {"query": row["context"], **dict(zip(passages, texts, strict=True)), "label": of}

    texts = [(name, pa.string()) for name in ("query", *passages)]
    write_labels(path, rows(), pa.schema([*texts, ("label", pa.list_(pa.float32()))]))


def write_flagembedding(path: Path, labels: Labels, corpus: CorpusStore, loss: LossConfig) -> None:
    """Write the training texts for FlagEmbedding's `knowledge_distillation`: JSON Lines with teacher scores.

        {"query": …, "pos": [document], "neg": [documents], "pos_scores": [score], "neg_scores": [scores]}

    The positive is the document that the LM finds best, the others follow in the LM's order. A score is z / beta
    (REPLUG, section 4), so the softmax that FlagEmbedding takes over a row's scores is Q.
    """
    scores = document_scores(labels.scores("queries"), loss.lm_score.value) / loss.beta
    partial = path.with_name(path.name + ".partial")
    with writing(partial):
        with partial.open("w", encoding="utf-8") as file:
            for row, of in zip(labels.rows("queries"), scores, strict=True):
                order = np.argsort(-of, kind="stable")
                texts = corpus.texts(np.array(row["doc_rows"])[order])
                best, *others = of[order].tolist()
                line = {"query": row["context"], "pos": texts[:1], "neg": texts[1:]}
                line |= {"pos_scores": [best], "neg_scores": others}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.replace(path)
