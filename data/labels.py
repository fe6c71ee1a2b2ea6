"""LM scores of candidate documents, written once by `replug prepare --labels` for `train.labels`.

LABELS/queries.parquet   a row for each training text, in the order of the prepared set
LABELS/dev.parquet       the same for its development texts, if any, with the log-prob of every token
LABELS/inputs.json       the inputs of the labels (`LabelOrigin`)
LABELS/manifest.json     written last: the number of rows, and checksums

A row has the text (`id`, `domain`, `source`, `context`, `continuation`; `query` if any text has a separate one),
`num_tokens` of the continuation, and lists over its K candidates, the nearest of the retriever first:

doc_ids, doc_rows        the document, and its row in the corpus
similarities             by the retriever at the time of labelling
sum_logprobs             of the continuation after document and context, nats

Any reader of Parquet reads it. All texts have the same number of candidates.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import UserError
from replug.data.folder import Folder
from replug.data.records import NO_INDEX, RetrievedBatch, ScoredBatch
from replug.data.shards import write_parquet

SPLITS = ("queries", "dev")
ROWS_PER_GROUP = 256
TEXT_FIELDS = ("id", "domain", "source", "context", "continuation")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in TEXT_FIELDS]
    + [
        ("num_tokens", pa.int32()),
        ("doc_ids", pa.list_(pa.string())),
        ("doc_rows", pa.list_(pa.int64())),
        ("similarities", pa.list_(pa.float32())),
        ("sum_logprobs", pa.list_(pa.float64())),
    ]
)
TOKENS = "token_logprobs"  # of development texts: by candidate, the continuation's tokens
QUERY_FIELDS = [("query", pa.string())]  # if any text of a split has a query that is not its context


def schema_of(is_dev: bool, has_queries: bool) -> pa.Schema:
    """Return the columns of a split."""
    more = ([(TOKENS, pa.list_(pa.list_(pa.float32())))] if is_dev else []) + (QUERY_FIELDS if has_queries else [])
    return pa.schema([*SCHEMA, *(pa.field(*field) for field in more)])


AGAIN = "run `replug prepare --labels` again in an empty folder"


@dataclass(frozen=True, slots=True)
class LabelOrigin:
    """The inputs of labels; equal origins give the same labels."""

    lm: str  # its identity
    too_long: str
    retriever: str  # its weights, similarity and limit of tokens
    set_sha256: str  # of the prepared set's manifest
    corpus_sha256: str
    dense: int
    bm25: int
    random: int
    exclude_own_source: bool
    seed: int
    hits: str = ""  # hash of the run that supplies the first candidates, or `rows`

    @property
    def num_candidates(self) -> int:
        return self.dense + self.bm25 + self.random


def labels_folder(path: Path) -> Folder:
    """Return the folder of labels: claimed for a `LabelOrigin`, finished with the `counts` of its splits."""
    others = ("index", "scores.sqlite*", "lm_spent.json*", "*.partial")
    return Folder(path, "set of labels", key="--labels or train.labels", fix_hint=AGAIN, others=others, format=3)


class Labels:
    """Reads a finished folder of labels. Raises UserError if it is unfinished, damaged or missing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, labels_folder(folder)
        self.counts: dict[str, int] = self._files.manifest()["counts"]
        self.origin = LabelOrigin(**(self._files.inputs or {}))

    def scores(self, split: str) -> ScoredBatch:
        """Return all examples of `queries` or `dev` with their candidates and scores, as one batch.

        Similarities are by the retriever at the time of labelling. Raises UserError if the split is empty or damaged.
        """
        table = self._table(split, ["doc_rows", "sum_logprobs", "num_tokens", "similarities"])
        doc_rows, similarities = _matrix(table, "doc_rows", np.int64), _matrix(table, "similarities", np.float32)
        retrieved = RetrievedBatch(0, 0, NO_INDEX, 0, np.arange(len(table)), doc_rows, similarities)
        num_tokens = np.array(table.column("num_tokens"), np.int64)
        return ScoredBatch(retrieved, _matrix(table, "sum_logprobs", np.float64), num_tokens)

    def token_logprobs(self) -> list[np.ndarray]:
        """Return each development text's token log-probs [K, T] float32 by candidate."""
        rows = self._table("dev", [TOKENS]).column(TOKENS).to_pylist()
        return [np.array(row, np.float32) for row in rows]

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield every row of a split in order, with a few in memory at a time."""
        with pq.ParquetFile(self.folder / f"{split}.parquet") as file:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                yield from batch.to_pylist()

    def require(self, wanted: LabelOrigin) -> None:
        """Raise UserError if LM, prompt, set or corpus differ from the training's."""
        names = ("set_sha256", "corpus_sha256", "lm", "too_long", "exclude_own_source")
        self._files.check({name: getattr(wanted, name) for name in names}, are_all=False)

    def _table(self, split: str, columns: list[str]) -> pa.Table:
        name = f"{split}.parquet"
        if not self.counts.get(split):
            raise UserError(
                f"train.labels: {self.folder} has no development texts; label a prepared set that has some "
                "(data.num_dev, or data.dev of your own)"
            )
        self._files.require(name)
        return pq.read_table(self.folder / name, columns=columns)


def write_labels(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> int:
    """Stream the rows of a split to its file; returns how many."""
    return write_parquet(path, rows, schema, ROWS_PER_GROUP)


def _matrix(table: pa.Table, name: str, dtype: type) -> np.ndarray:
    flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.array(flat, dtype).reshape(len(table), -1)
