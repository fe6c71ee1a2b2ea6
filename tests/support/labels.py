"""Labels of a prepared set by the stand-in LM, made in this process: neither Ray nor an index."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from replug.config.schema import Config
from replug.data.labels import Labels, labels_folder, schema_of, write_labels
from replug.data.store import PreparedSet
from replug.models.black_box_lm import ContinuationScore
from replug.models.build import load_encoder
from replug.models.prompt import PromptTemplate
from replug.train.labels import label_origin, label_rows, mix_candidates
from tests.support.training import InlineLM


class LabellingLM(InlineLM):
    """Answers at once, with tokens too; counts the pairs."""

    num_pairs = 0

    def submit(self, prefixes, continuations, *, opening=None, read=0):
        self.num_pairs += len(prefixes)
        future: Future[list[ContinuationScore]] = Future()
        future.set_result(self.score(prefixes, continuations, read=read))
        return future


def write_stand_in_labels(
    folder: Path, config: Config, data: PreparedSet, lm: LabellingLM | None = None, check: Callable = lambda: None
) -> Labels:
    """By `label.dense` nearest documents of the configured encoder and `label.random` others."""
    lm, encoder = lm or LabellingLM(), load_encoder(config.retriever)
    vectors = encoder.encode([document.text for document in data.corpus.iterate()]).numpy()
    template = PromptTemplate()
    made = labels_folder(folder)
    made.claim(asdict(label_origin(config, data, lm.identity, encoder)))
    stores = {"queries": data.queries, **({"dev": data.dev} if data.dev else {})}
    counts = {"queries": len(data.queries), "dev": len(data.dev) if data.dev else 0}
    for split, store in stores.items():
        similarities = encoder.encode([example.context for example in store.examples()]).numpy() @ vectors.T
        dense = np.argsort(-similarities, axis=1, kind="stable")[:, : config.label.dense]
        none = np.empty((len(store), 0), np.int64)
        candidates = mix_candidates(
            replace(config.label, bm25=0),
            dense=dense,
            bm25=none,
            num_documents=len(data.corpus),
            seed=config.seed,
            allowed=lambda row, doc_rows: np.ones(len(doc_rows), bool),
        )
        own = np.take_along_axis(similarities, candidates, axis=1)
        rows = label_rows(lm, template, data.corpus, check, store, candidates, own, split == "dev")  # type: ignore[arg-type]
        write_labels(folder / f"{split}.parquet", rows, schema_of(split == "dev", has_queries=False))
    made.finish([f"{split}.parquet" for split in stores], {"counts": counts})
    return Labels(folder)
