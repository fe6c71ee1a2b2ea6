"""Labels as FlagEmbedding reads them: JSON Lines with teacher scores for its `knowledge_distillation`.

    {"query": …, "pos": [document], "neg": [documents], "pos_scores": [score], "neg_scores": [scores]}

The positive is the document that the LM finds best, the others follow in the LM's order. A score is z / beta (REPLUG,
section 4), so the softmax that FlagEmbedding takes over a row's scores is Q.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from replug.data.files import writing
from replug.data.labels import Labels
from replug.data.store import CorpusStore
from replug.train.labels.targets import document_scores
from replug.train.module import LossSettings


def write_flagembedding(path: Path, labels: Labels, corpus: CorpusStore, loss: LossSettings) -> None:
    """The training texts, a line for each."""
    partial = path.with_name(path.name + ".partial")
    with writing(partial):
        with partial.open("w", encoding="utf-8") as file:
            for row in _rows(labels, corpus, loss):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        partial.replace(path)


def _rows(labels: Labels, corpus: CorpusStore, loss: LossSettings) -> Iterator[dict]:
    scores = document_scores(labels.texts("queries"), loss.lm_score) / loss.beta
    for row, of in zip(labels.rows("queries"), scores, strict=True):
        order = np.argsort(-of, kind="stable")
        texts = corpus.texts(np.array(row["doc_rows"])[order])
        best, *others = of[order].tolist()
        yield {
            **{"query": row["context"], "pos": texts[:1], "neg": texts[1:]},
            **{"pos_scores": [best], "neg_scores": others},
        }
