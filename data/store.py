"""Prepared sets on disk: Arrow files that are memory-mapped, so reading a row never loads the corpus.

SET/documents.arrow   id, text, domain, source
SET/queries.arrow     id, context, continuation, domain, source, gold
SET/heldout.arrow     the same
SET/manifest.json     written last: a set without it is unfinished and is made again
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from datasets import Dataset

from configs.errors import RunError, UserError
from data.records import Document, Window

FILES = ("documents.arrow", "queries.arrow", "heldout.arrow")
ROWS_PER_BATCH = 1000
DOCUMENT_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "text", "domain", "source")])
WINDOW_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "context", "continuation", "domain", "source")]
    + [("gold", pa.list_(pa.string()))]
)


class CorpusStore:
    """Documents by row number."""

    def __init__(self, path: Path) -> None:
        self._table = _open_table(path)

    def __len__(self) -> int:
        return len(self._table)

    def texts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Texts in the order asked for."""
        return self._table[[int(row) for row in rows]]["text"]

    def sources(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """What each document was cut from, in the order asked for."""
        return self._table[[int(row) for row in rows]]["source"]

    def documents(self, rows: Sequence[int] | np.ndarray) -> list[Document]:
        columns = self._table[[int(row) for row in rows]]
        return [Document(*values) for values in zip(*(columns[name] for name in DOCUMENT_SCHEMA.names), strict=True)]

    def iterate(self) -> Iterator[Document]:
        """All documents in row order, a batch in memory at a time."""
        for start in range(0, len(self), ROWS_PER_BATCH):
            yield from self.documents(range(start, min(start + ROWS_PER_BATCH, len(self))))

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Row numbers of the documents with these ids; ids that are not there are left out."""
        wanted = set(ids)
        return {doc.id: row for row, doc in enumerate(self.iterate()) if doc.id in wanted} if wanted else {}


class WindowStore:
    """Training or held-out texts by row number."""

    def __init__(self, path: Path) -> None:
        self._table = _open_table(path)

    def __len__(self) -> int:
        return len(self._table)

    def windows(self, rows: Sequence[int] | np.ndarray | None = None) -> list[Window]:
        """Texts in the order asked for; all of them by default."""
        columns = self._table[:] if rows is None else self._table[[int(row) for row in rows]]
        fields = zip(*(columns[name] for name in WINDOW_SCHEMA.names), strict=True)
        return [Window(*texts, tuple(gold)) for *texts, gold in fields]  # type: ignore[call-arg]


def _open_table(path: Path) -> Dataset:
    try:
        return Dataset.from_file(str(path))
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is damaged, it is no Arrow file ({error}); prepare it again") from error


class Corpus(Protocol):
    """What an index is built of: documents, the file that holds them, and its hash."""

    corpus: CorpusStore

    @property
    def corpus_path(self) -> Path: ...

    @property
    def corpus_sha256(self) -> str: ...


class ImportedCorpus:
    """Documents without texts to train on: documents.arrow and, written last, corpus.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = CorpusStore(self.corpus_path)
        self.manifest: dict[str, str] = json.loads((folder / "corpus.json").read_text())

    @property
    def corpus_path(self) -> Path:
        return self.folder / "documents.arrow"

    @property
    def corpus_sha256(self) -> str:
        return self.manifest["sha256"]


class PreparedSet:
    """A finished prepared set; raises UserError for one that is unfinished or not there."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "manifest.json").is_file():
            raise UserError(f"{folder} is not a prepared set: manifest.json is missing; run `replug prepare` again")
        self.folder = folder
        self.manifest = _read_manifest(folder)
        self.corpus = CorpusStore(self.corpus_path)
        self.queries = WindowStore(folder / "queries.arrow")
        self.heldout = WindowStore(folder / "heldout.arrow")

    @property
    def corpus_path(self) -> Path:
        return self.folder / "documents.arrow"

    @property
    def corpus_sha256(self) -> str:
        return self.manifest["files"]["documents.arrow"]


def _read_manifest(folder: Path) -> dict:
    mend = "remove the folder and run `replug prepare` again"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder}/manifest.json is not valid JSON ({error}); {mend}") from error
    if not isinstance(manifest, dict) or "disjoint" not in manifest:
        raise UserError(f"{folder}/manifest.json holds no proof of disjointness; {mend}")
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}/{name} is missing; {mend}")
    return manifest


def write_documents(path: Path, documents: Iterable[Document]) -> int:
    """Stream documents to an Arrow file; returns how many."""
    rows = ({name: getattr(doc, name) for name in DOCUMENT_SCHEMA.names} for doc in documents)
    return _write(path, DOCUMENT_SCHEMA, rows)


def write_windows(path: Path, windows: Iterable[Window]) -> int:
    """Stream windows to an Arrow file; returns how many."""
    rows = ({name: getattr(window, name) for name in WINDOW_SCHEMA.names} for window in windows)
    return _write(path, WINDOW_SCHEMA, rows)


def _write(path: Path, schema: pa.Schema, rows: Iterable[dict]) -> int:
    count, batch = 0, []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for row in rows:
            batch.append(row)
            count += 1
            if len(batch) == ROWS_PER_BATCH:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                batch = []
        if batch:
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    return count


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: object) -> None:
    """Replace a file by this content."""
    replace_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader sees all of the old or all of the new."""
    partial = path.with_name(path.name + ".partial")
    with writing(partial):
        partial.write_bytes(content)
        partial.replace(path)


@contextmanager
def writing(partial: Path) -> Iterator[None]:
    """Where the disk does not take a file or folder, remove what there is of it and raise RunError with its name."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise RunError(f"{partial} cannot be written: {error.strerror or error}") from error
