"""The folder of a prepared set, and its corpus: shards of documents, Arrow for texts and arrays for token ids.

    documents/00000.arrow        id, text, domain, source; embedded_title, if any document has one
    documents/00000.tokens.npy   all rows' token ids, one after the other: uint16 where they fit, else uint32
    documents/00000.ends.npy     where each row's ids end, int64
    documents/tokens.json        the tokenizer's fingerprint, so that another retriever does not read the ids
    documents/store.json         instead of all these: the vector store of the documents

Workers write them without `datasets`, since importing it takes longer than a shard.
"""

import io
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replug.data.files import file_sha256, json_sha256, replace_file, replacing, write_json
from replug.data.folder import Folder
from replug.data.records import Document, Example

FIX = "remove the folder and run `replug prepare` again"
TOKEN_RULES = "tokens.json"
STORE, FOUND = "store.json", "found.sqlite"  # a store, and beside the folder its retrieved documents (`store`)
ROWS_PER_BATCH = 1000
ROWS_PER_SHARD = 1 << 16
DOCUMENT_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "text", "domain", "source")])
EXAMPLE_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "context", "continuation", "domain", "source")]
    + [("gold", pa.list_(pa.string()))]
)
OWN_DOCUMENT_COLUMNS = pa.schema([("embedded_title", pa.string())])  # where some document of the shard has one
OWN_COLUMNS = pa.schema([("query", pa.string()), ("candidates", pa.list_(pa.string()))])  # where some example has them


OWN_CORPUS = "corpus"  # an index's folder for documents without a set


def prepared_folder(path: Path, key: str = "data.out") -> Folder:
    """Return the folder of a prepared set; `key` names where to write another."""
    return Folder(path, "prepared set", key=key, fix_hint=FIX, others=(f"{FOUND}*",))


def write_documents(folder: Path, documents: Iterable[Document]) -> int:
    """Stream documents into shards, without token ids; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, rows in enumerate(in_batches(documents, ROWS_PER_SHARD)):
        own = OWN_DOCUMENT_COLUMNS if any(row.embedded_title for row in rows) else ()
        write_rows(folder / f"{number:05d}.arrow", pa.schema([*DOCUMENT_SCHEMA, *own]), rows)
        count += len(rows)
    return count


def write_examples(path: Path, examples: Iterable[Example], own: Collection[str] = ()) -> int:
    """Stream examples to an Arrow file, with `own` of OWN_COLUMNS; returns how many."""
    return write_rows(path, pa.schema([*EXAMPLE_SCHEMA, *(of for of in OWN_COLUMNS if of.name in own)]), examples)


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Document] | Iterable[Example]) -> int:
    count = 0
    with replacing(path) as partial, pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in in_batches(rows, ROWS_PER_BATCH):
            columns = {name: [getattr(row, name) for row in batch] for name in schema.names}
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
            count += len(batch)
    return count


def write_parquet(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema, rows_per_group: int) -> int:
    """Stream rows to a Parquet file, renamed into place when complete; returns their number."""
    count = 0
    with replacing(path) as partial, pq.ParquetWriter(partial, schema) as writer:
        for batch in in_batches(rows, rows_per_group):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def write_token_ids(shard: Path, ids: Sequence[np.ndarray], dtype: np.dtype) -> None:
    """Write the ids of each row of a shard, beside its texts."""
    tokens, ends = token_paths(shard)
    flat = np.concatenate(ids) if ids else np.empty(0, dtype)
    replace_file(tokens, _npy(flat.astype(dtype, copy=False)))
    replace_file(ends, _npy(np.cumsum([len(row) for row in ids], dtype=np.int64)))


def token_paths(shard: Path) -> tuple[Path, Path]:
    """Return the paths of a shard's token ids and of the ends of its rows."""
    return shard.with_suffix(".tokens.npy"), shard.with_suffix(".ends.npy")


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of a corpus, in row order, or the file that names the store of its documents."""
    return sorted([*folder.glob("*.arrow"), *folder.glob(STORE)])


def read_documents_of(shard: Path) -> Iterator[Document]:
    """Yield the documents of one shard, a batch in memory at a time."""
    for columns in _read_batches(shard):
        yield from (Document(**row) for row in columns)


def read_examples_of(path: Path) -> Iterator[Example]:
    for columns in _read_batches(path):
        yield from map(example_of, columns)


def example_of(row: dict[str, Any]) -> Example:
    """Return the example of a row of the file; its lists become tuples."""
    values: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in row.items()}
    return Example(**values)


def corpus_sha256(folder: Path) -> str:
    """Return one hash over the texts of all shards."""
    return json_sha256(sorted((path.name, file_sha256(path)) for path in shard_paths(folder)))


def write_token_rules(folder: Path, fingerprint: str) -> None:
    write_json(folder / TOKEN_RULES, {"fingerprint": fingerprint})


def _read_batches(path: Path) -> Iterator[list[dict]]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            yield batch.to_pylist()


def in_batches(rows: Iterable, size: int) -> Iterator[list]:
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def _npy(array: np.ndarray) -> bytes:
    body = io.BytesIO()
    np.save(body, array, allow_pickle=False)
    return body.getvalue()
