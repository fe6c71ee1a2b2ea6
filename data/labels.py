"""What an LM says of candidate documents, written down once by `replug prepare --labels` for `train.labels`.

LABELS/queries.parquet   a row for each training text, in the order of the prepared set
LABELS/dev.parquet       the same of its development texts, where it has any, with the log-prob of every token
LABELS/labels.json       written last: what the rows are of, their number, and checksums

A row has the text (`id`, `domain`, `source`, `context`, `continuation`), `num_tokens` of the continuation,
`sum_logprob_alone` (nats) without a document, and lists over its K candidates, the nearest of the retriever first:

doc_ids, doc_rows        the document, and its row in the corpus
given_by, ranks          which of dense, tuned, bm25 and random gave it, and as which (from 1)
similarities             to the retriever as it was when the texts were labelled
sum_logprobs             of the continuation after document and context, nats

Any reader of Parquet reads it. All texts have the same number of candidates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import UserError
from replug.data.files import file_sha256, writing
from replug.data.manifest import read_mark, require_checksums, write_mark
from replug.data.shards import in_batches
from replug.data.store import ExampleStore, PreparedSet

FORMAT = 1
MARK = "labels.json"
SPLITS = ("queries", "dev")
GIVERS = ("dense", "bm25", "random", "tuned")
ROWS_PER_GROUP = 256
TEXT_FIELDS = ("id", "domain", "source", "context", "continuation")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in TEXT_FIELDS]
    + [
        ("num_tokens", pa.int32()),
        ("sum_logprob_alone", pa.float64()),
        ("doc_ids", pa.list_(pa.string())),
        ("doc_rows", pa.list_(pa.int64())),
        ("given_by", pa.list_(pa.string())),
        ("ranks", pa.list_(pa.int32())),
        ("similarities", pa.list_(pa.float32())),
        ("sum_logprobs", pa.list_(pa.float64())),
    ]
)
# Of development texts: by candidate, and without a document, the continuation's tokens.
TOKEN_FIELDS = [
    ("token_logprobs", pa.list_(pa.list_(pa.float32()))),
    ("token_logprobs_alone", pa.list_(pa.float32())),
]
DEV_SCHEMA = pa.schema([*SCHEMA, *(pa.field(*field) for field in TOKEN_FIELDS)])
AGAIN = "run `replug prepare --labels` again"


@dataclass(frozen=True, slots=True)
class LabelOrigin:
    """What labels follow from; equal origins are the same labels."""

    lm: str  # its identity
    separator: str
    too_long: str
    retriever: str  # its weights, similarity and limit of tokens
    set_sha256: str  # of the prepared set's manifest
    corpus_sha256: str
    dense: int
    bm25: int
    random: int
    exclude_own_source: bool
    seed: int
    tuned: int = 0
    tuned_queries: str = ""  # weights of the tuned query encoder

    @property
    def num_candidates(self) -> int:
        return self.dense + self.tuned + self.bm25 + self.random


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """N texts of one split and their K candidates, by rows of the prepared set. Log-probs are in nats."""

    doc_rows: np.ndarray  # [N, K] int64
    sum_logprobs: np.ndarray  # [N, K] float64
    num_tokens: np.ndarray  # [N] int64
    similarities: np.ndarray  # [N, K] float32: of the retriever as it was
    token_logprobs: tuple[np.ndarray, ...] = ()  # of each text [K, T] float32; development texts alone
    token_logprobs_alone: tuple[np.ndarray, ...] = ()  # of each text [T] float32; development texts alone

    def __len__(self) -> int:
        return len(self.num_tokens)


class Labels:
    """A finished folder of labels. Raises UserError for one that is unfinished, damaged or not there."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MARK).is_file():
            raise UserError(f"{folder} holds no finished labels: {MARK} is missing; {AGAIN}")
        self.folder = folder
        self.mark = read_mark(folder / MARK)
        if self.mark.get("format") != FORMAT:
            raise UserError(f"{folder} is of another version of replug; {AGAIN}")
        self.origin = LabelOrigin(**self.mark["origin"])
        self.counts: dict[str, int] = self.mark["counts"]

    def texts(self, split: str) -> LabelledTexts:
        """Those of `queries` or `dev`. Raises UserError where there are none, or the file is another."""
        name = f"{split}.parquet"
        if not self.counts.get(split):
            raise UserError(
                f"train.labels: {self.folder} has no development texts; label a prepared set that has some "
                "(data.num_dev, or data.dev of your own)"
            )
        require_checksums(self.folder, f"{AGAIN} in an empty folder", [name], MARK)
        return _labelled(pq.read_table(self.folder / name, columns=_numbers(split)))

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Every row of a split in order, some in memory at a time."""
        with pq.ParquetFile(self.folder / f"{split}.parquet") as file:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                yield from batch.to_pylist()

    @property
    def has_dev(self) -> bool:
        return bool(self.counts.get("dev"))


def require_labels_of(origin: LabelOrigin, asked: LabelOrigin, folder: Path) -> None:
    """Raise UserError for the first thing that labels are of and a training is not."""
    named = {
        "set_sha256": "data: the prepared set is another than",
        "corpus_sha256": "data: the corpus is another than",
        "lm": "lm: another LM than",
        "separator": "lm.separator is another than",
        "too_long": "lm.too_long is another than",
        "exclude_own_source": "retrieve.exclude_own_source is another than",
    }
    for name, said in named.items():
        labelled, now = getattr(origin, name), getattr(asked, name)
        if labelled != now:
            raise UserError(
                f"{said} that of the labels in {folder} ({labelled!r} there, {now!r} here): give that one, or label "
                "anew"
            )


def write_labels(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> int:
    """Stream rows to a Parquet file, which is there when it is whole; returns how many."""
    count, partial = 0, path.with_name(path.name + ".partial")
    with writing(partial):
        with pq.ParquetWriter(partial, schema) as writer:
            for batch in in_batches(rows, ROWS_PER_GROUP):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
        partial.replace(path)
    return count


def finish_labels(folder: Path, origin: LabelOrigin, counts: dict[str, int]) -> None:
    """Write the mark, last of all."""
    files = {f"{split}.parquet": file_sha256(folder / f"{split}.parquet") for split, count in counts.items() if count}
    content = {"format": FORMAT, "origin": asdict(origin), "counts": counts, "files": files}
    write_mark(folder / MARK, content)


def text_columns(store: ExampleStore, rows: Sequence[int]) -> list[dict[str, Any]]:
    """The fields of each text that say what it is."""
    return [{name: getattr(example, name) for name in TEXT_FIELDS} for example in store.examples(rows)]


def labelled_store(data: PreparedSet, split: str) -> ExampleStore:
    """Where the texts of a split of labels are read."""
    return data.queries if split == "queries" else data.require_dev()


def _numbers(split: str) -> list[str]:
    named = ["doc_rows", "sum_logprobs", "num_tokens", "similarities"]
    return [*named, *(name for name, _ in TOKEN_FIELDS)] if split == "dev" else named


def _labelled(table: pa.Table) -> LabelledTexts:
    tokens: list[tuple[np.ndarray, ...]] = []
    if "token_logprobs" in table.column_names:
        by_document = table.column("token_logprobs").to_pylist()
        alone = table.column("token_logprobs_alone").to_pylist()
        tokens = [tuple(np.array(rows, np.float32) for rows in column) for column in (by_document, alone)]
    return LabelledTexts(
        _matrix(table, "doc_rows", np.int64),
        _matrix(table, "sum_logprobs", np.float64),
        np.array(table.column("num_tokens"), np.int64),
        _matrix(table, "similarities", np.float32),
        *tokens,
    )


def _matrix(table: pa.Table, name: str, dtype: type) -> np.ndarray:
    flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.array(flat, dtype).reshape(len(table), -1)
