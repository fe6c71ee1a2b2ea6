"""Prepared sets on disk: memory-mapped files, so reading a row never loads the corpus.

SET/documents/        shards of documents: id, text, domain, source, and the retriever's token ids (`shards`)
SET/queries.arrow     id, context, continuation, domain, source, gold; query and candidates, if any row has them
SET/heldout.arrow     the same
SET/dev.arrow         the same, if development texts were requested
SET/rejected.jsonl    rejected rows and files of the source, if any
SET/inputs.json, manifest.json    the inputs and the content of the set (`folder`)

A set for an index alone, without texts to train on, has documents/ only.
"""

import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets

from replug.config.errors import UserError
from replug.data.files import json_sha256, read_json, reading, write_json
from replug.data.records import Document, Example
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    FIX,
    FOUND,
    ROWS_PER_BATCH,
    STORE,
    TOKEN_RULES,
    example_of,
    prepared_folder,
    shard_paths,
    token_paths,
)
from replug.data.vector_stores import CandidateSource, StoredDocument, open_source
from replug.data.words import hash64

TEXTS = ("queries.arrow", "heldout.arrow")
DEV = "dev.arrow"
WITHOUT_PROOF = ", so the manifest's proof that training and held-out texts are disjoint does not cover it"


class CorpusStore:
    """Documents by row number, over the shards of a folder. Raises UserError if there are none."""

    url: str | None = None  # of the vector store that holds the documents

    def __init__(self, folder: Path) -> None:
        shards = shard_paths(folder)
        if not shards:
            raise UserError(f"{folder} holds no documents; expected the shards that `replug prepare` writes")
        self._shards, self._files = shards, prepared_folder(folder.parent)
        self._files.require(f"{folder.name}/{TOKEN_RULES}")
        tables = [_open_table(path) for path in shards]
        count = sum(map(len, tables))
        written = self._files.manifest()["counts"]["documents"] if self._files.is_finished else count
        if written != count:  # a flipped bit can truncate a shard
            self._require(np.arange(len(shards)))
            raise UserError(f"{folder} holds {count} documents, but {written} were written; {FIX}")
        self._table = concatenate_datasets(tables)
        self._starts = np.cumsum([0, *map(len, tables)])
        rules = folder / TOKEN_RULES
        # The fingerprint of the tokenizer that made the ids in the folder; None without ids.
        self.tokens_by: str | None = json.loads(rules.read_text())["fingerprint"] if rules.is_file() else None
        pairs = map(token_paths, shards) if self.tokens_by is not None else ()
        self._tokens = [(_open_array(tokens), _open_array(ends)) for tokens, ends in pairs]

    def __len__(self) -> int:
        return len(self._table)

    def token_ids(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the retriever's token ids in the requested order; only if `tokens_by` names its tokenizer."""
        rows = np.asarray(rows)
        shards = np.searchsorted(self._starts, rows, "right") - 1
        self._require(shards, are_tokens=True)
        places = (rows - self._starts[shards]).tolist()
        return [
            tokens[int(ends[place - 1]) if place else 0 : int(ends[place])]
            for (tokens, ends), place in zip((self._tokens[shard] for shard in shards.tolist()), places, strict=True)
        ]

    def texts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return texts in the requested order."""
        return self._columns(rows)["text"]

    def embedded_texts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the retriever's input for each document, in the requested order."""
        return [document.embedded_text for document in self.documents(rows)]

    def sources(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return each document's source, in the requested order."""
        return self._columns(rows)["source"]

    def documents(self, rows: Sequence[int] | np.ndarray) -> list[Document]:
        columns = self._columns(rows)
        titles = [title or "" for title in columns.get("embedded_title", [""] * len(rows))]
        values = zip(*(columns[name] for name in DOCUMENT_SCHEMA.names), titles, strict=True)
        return [Document(*of) for of in values]

    def iterate(self) -> Iterator[Document]:
        """Yield all documents in row order, a batch in memory at a time."""
        for start in range(0, len(self), ROWS_PER_BATCH):
            yield from self.documents(range(start, min(start + ROWS_PER_BATCH, len(self))))

    def num_bytes(self) -> np.ndarray:
        """Return UTF-8 bytes of each document's text; the texts themselves are not read."""
        return _num_bytes(self._table, "text")

    def _columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, list[str]]:
        """Return the columns of some rows, after comparing their shards with the checksums."""
        self._require(np.searchsorted(self._starts, np.asarray(rows), "right") - 1)
        return self._table[[int(row) for row in rows]]

    def _require(self, shards: np.ndarray, are_tokens: bool = False) -> None:
        for shard in np.unique(shards).tolist():
            path = self._shards[shard]
            for file in token_paths(path) if are_tokens else (path,):
                self._files.require(f"{file.parent.name}/{file.name}")

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Return rows of documents at random: all of them, each once."""
        return rng.permutation(len(self))

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return row numbers of the documents with these ids; ids that are not there are left out."""
        self._require(np.arange(len(self._shards)))
        column = self._table.data.column("id")
        rows = np.flatnonzero(pc.is_in(column, value_set=pa.array(sorted(set(ids)), column.type)))
        return dict(zip(column.take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True))


class StoredCorpus(CorpusStore):
    """Documents that stay in a vector store. The row of a document is a hash of its id.

    SET/documents/store.json names the store. SET/found.sqlite keeps the retrieved documents, as the store last returned
    them, for every process of a run.
    """

    tokens_by = None

    def __init__(self, folder: Path) -> None:
        known = read_json(folder / STORE, FIX)
        self.url, self.dim, self.similarity = known["url"], known["dim"], known["similarity"]
        self._count, self._sample = known["count"], known["sample"]
        self._path = folder.parent / FOUND
        with self._database() as database:
            database.execute("CREATE TABLE IF NOT EXISTS found (row INTEGER PRIMARY KEY, id, text, source, vector)")

    def __len__(self) -> int:
        return self._count

    def open(self) -> CandidateSource:
        """Open the store. Raises UserError if it has lost documents since the set was prepared."""
        source = open_source(str(self.url))
        if len(source) < self._count:
            raise UserError(
                f"data.corpus: {self.url} holds {len(source):,} documents, and held {self._count:,} when "
                f"{self._path.parent} was prepared; bring them back, or start again in another run_dir"
            )
        return source

    def keep(self, documents: Sequence[StoredDocument], source: CandidateSource) -> np.ndarray:
        """Keep retrieved documents, replacing earlier versions, and return their rows.

        Raises UserError for two documents with the same id, as passages of one text may have. If an id had another text
        before, `source` tells a changed document from a second one.
        """
        rows = [hash64(document.id) >> 1 for document in documents]
        with self._database() as database:
            known = [database.execute("SELECT text FROM found WHERE row = ?", [row]).fetchone() for row in rows]
        others = [doc.id for doc, before in zip(documents, known, strict=True) if before not in (None, (doc.text,))]
        for stored in (documents, source.get(others) if others else ()):
            ids = Counter(document.id for document in stored)
            if ids.total() > len(ids):
                raise UserError(
                    f"data.corpus: {self.url} has several documents with the id {ids.most_common(1)[0][0]!r}; expected "
                    "ids that are unique: name their field by &id=FIELD"
                )
        values = [
            (row, doc.id, doc.text, doc.source, doc.vector.tobytes()) for row, doc in zip(rows, documents, strict=True)
        ]
        with self._database() as database:
            database.executemany("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?)", values)
        return np.array(rows, np.int64)

    def vectors(self, rows: np.ndarray, similarity: str) -> np.ndarray:
        """Return vectors [..., D] float32 of retrieved documents; unit vectors for cosine."""
        joined = b"".join(self._select("vector", rows.ravel()))
        return comparable(np.frombuffer(joined, np.float32).reshape(*rows.shape, self.dim), similarity)

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return rows of the documents with these ids. Documents not yet retrieved are fetched from the store."""
        rows = {id: hash64(id) >> 1 for id in ids}
        with self._database() as database:
            there = {row for (row,) in database.execute("SELECT row FROM found")}
        if unknown := [id for id, row in rows.items() if row not in there]:
            with closing(self.open()) as source:
                for start in range(0, len(unknown), ROWS_PER_BATCH):
                    got = source.get(unknown[start : start + ROWS_PER_BATCH])
                    there.update(self.keep(got, source).tolist())
        return {id: row for id, row in rows.items() if row in there}

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Return rows of a few documents of the store, in random order."""
        return rng.permutation([hash64(id) >> 1 for id in self._sample])

    def iterate(self) -> Iterator[Document]:
        """Raise UserError: most documents are in the store alone."""
        raise UserError(
            f"data.corpus: BM25 reads all documents, but {self.url} is only searched; expected dense search alone"
        )

    def _columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, list[str]]:
        columns = {name: self._select(name, rows) for name in ("id", "text", "source")}
        return {**columns, "domain": [""] * len(rows)}

    def _select(self, column: str, rows: Sequence[int] | np.ndarray) -> list[Any]:
        with self._database() as database:
            values = [
                database.execute(f"SELECT {column} FROM found WHERE row = ?", [int(row)]).fetchone() for row in rows
            ]
        if None in values:
            raise UserError(
                f"data.corpus: no search in {self.url} returned a requested document; random documents need a corpus "
                "in files"
            )
        return [value for (value,) in values]

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open the retrieved documents for one transaction, safe for several processes and threads."""
        with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            yield database


def comparable(vectors: np.ndarray, similarity: str) -> np.ndarray:
    """Return vectors [..., D] with similarities as inner products: for cosine, of length 1."""
    if similarity == "dot":
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


SAMPLED = 8  # documents of a store that a set records, to compare their vectors with the encoder's


def write_store(folder: Path, url: str) -> int:
    """Name a vector store as the corpus of the prepared set; returns the number of its documents."""
    with closing(open_source(url)) as source:
        sample = list(itertools.islice(source.iterate(), SAMPLED))
        count = len(source)
        known = {"url": url, "count": count, "dim": source.dim, "similarity": source.similarity}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STORE, {**known, "sample": [document.id for document in sample]})
        StoredCorpus(folder).keep(sample, source)
    return count


def open_corpus(folder: Path) -> CorpusStore:
    """Open the documents of a prepared set, in files or in a vector store."""
    return StoredCorpus(folder) if (folder / STORE).is_file() else CorpusStore(folder)


class ExampleStore:
    """Training or held-out texts by row number. Raises UserError for a file that differs from its manifest."""

    def __init__(self, path: Path) -> None:
        prepared_folder(path.parent).require(path.name, meaning=WITHOUT_PROOF)
        self._table = _open_table(path)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def has_queries(self) -> bool:
        """Return whether any example has a query that is not its context."""
        return "query" in self._table.column_names

    def num_bytes(self) -> np.ndarray:
        """Return UTF-8 bytes of each text, context and continuation together; the texts themselves are not read."""
        return _num_bytes(self._table, "context") + _num_bytes(self._table, "continuation")

    def gold(self) -> dict[str, str]:
        """Return the gold documents, each with the id of a text that names it."""
        lists = self._table.data.column("gold")
        texts = self._table.data.column("id").take(pc.list_parent_indices(lists))
        return dict(zip(pc.list_flatten(lists).to_pylist(), texts.to_pylist(), strict=True))

    def examples(self, rows: Sequence[int] | np.ndarray | None = None) -> list[Example]:
        """Return texts in the requested order; all of them by default."""
        columns = self._table[:] if rows is None else self._table[[int(row) for row in rows]]
        names = self._table.column_names
        values = zip(*map(columns.get, names), strict=True)
        return [example_of(dict(zip(names, of, strict=True))) for of in values]


def _num_bytes(table: Dataset, column: str) -> np.ndarray:
    return pc.binary_length(table.data.column(column)).to_numpy()


def _open_array(path: Path) -> np.ndarray:
    """Map a file by Arrow, which keeps no descriptor: numpy would keep two for each shard of a corpus."""
    try:
        with reading(path), pa.memory_map(str(path)) as file:
            content = pa.BufferReader(file.read_buffer())
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        return np.frombuffer(content.read_buffer(), dtype).reshape(shape)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); {FIX}") from error


def _open_table(path: Path) -> Dataset:
    try:
        return Dataset.from_file(str(path))
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the system's; Arrow's own have no number
            raise
        raise UserError(f"{path} is damaged, it is not an Arrow file ({error}); prepare it again") from error


class Corpus:
    """The documents of a finished prepared set, or documents alone. Raises UserError for an unfinished one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = prepared_folder(folder).manifest()
        for name in self.manifest["files"]:
            if not (folder / name).is_file():
                raise UserError(f"{folder}/{name} is missing; {FIX}")
        self.corpus = open_corpus(self.corpus_path)

    @property
    def corpus_path(self) -> Path:
        return self.folder / "documents"

    @property
    def corpus_sha256(self) -> str:
        """Return `shards.corpus_sha256` by the manifest, so that no text need be read again."""
        return json_sha256(
            sorted(
                (name.removeprefix("documents/"), known["sha256"])
                for name, known in self.manifest["files"].items()
                if name.startswith("documents/") and name.endswith((".arrow", STORE))
            )
        )


class PreparedSet(Corpus):
    """A finished prepared set. Raises UserError for a folder without a proof that its splits are disjoint."""

    def __init__(self, folder: Path) -> None:
        manifest = prepared_folder(folder).manifest()
        if "disjoint" not in manifest:  # documents alone, which `import_corpus` wrote
            raise UserError(f"{folder}/manifest.json holds no proof of disjointness; {FIX}")
        super().__init__(folder)
        self.inputs = prepared_folder(folder).inputs or {}
        self.queries, self.heldout = (ExampleStore(folder / name) for name in TEXTS)
        self.dev = ExampleStore(folder / DEV) if DEV in self.manifest["files"] else None

    @property
    def texts(self) -> tuple[ExampleStore, ...]:
        """Return the existing splits of texts."""
        return (self.queries, self.heldout, *([self.dev] if self.dev is not None else []))

    def require_dev(self) -> ExampleStore:
        """Return the development texts. Raises UserError if the set has none."""
        if self.dev is None:
            raise UserError(
                f"{self.folder} has no development texts; prepare a set with data.num_dev (raw texts) or data.dev "
                "(your own rows)"
            )
        return self.dev
