"""Prepared sets on disk: files that are memory-mapped, so reading a row never loads the corpus.

SET/documents/        shards of documents: id, text, domain, source, and the retriever's token ids (`shards`)
SET/queries.arrow     id, context, continuation, domain, source, gold
SET/heldout.arrow     the same
SET/dev.arrow         the same, where development texts were asked for
SET/rejected.jsonl    what of the source could not be taken, if anything
SET/manifest.json     written last: a set without it is unfinished, and the same command goes on with it
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets

from replug.config.errors import UserError
from replug.data.files import reading, wrong_files
from replug.data.manifest import FIX, CheckedFiles, read_mark
from replug.data.progress import Progress
from replug.data.records import Document, Example
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    EXAMPLE_SCHEMA,
    ROWS_PER_BATCH,
    TOKEN_RULES,
    combined_sha256,
    shard_paths,
    token_paths,
)

TEXTS = ("queries.arrow", "heldout.arrow")
DEV = "dev.arrow"
WITHOUT_PROOF = ", so the manifest's proof that training and held-out texts are disjoint is not of it"


class CorpusStore:
    """Documents by row number, over the shards of a folder. Raises UserError where there are none."""

    def __init__(self, folder: Path) -> None:
        shards = shard_paths(folder)
        if not shards:
            raise UserError(f"{folder} holds no documents; expected the shards that `replug prepare` writes")
        self._shards, self._files = shards, CheckedFiles(folder.parent)
        self._files.require(f"{folder.name}/{TOKEN_RULES}")
        tables = [_open_table(path, DOCUMENT_SCHEMA) for path in shards]
        found = sum(map(len, tables))
        if self._files.num_documents not in (None, found):  # a flipped bit may end a shard early
            self._require(np.arange(len(shards)))
            raise UserError(f"{folder} holds {found} documents, but {self._files.num_documents} were written; {FIX}")
        self._table = concatenate_datasets(tables)
        self._starts = np.cumsum([0, *map(len, tables)])
        self.tokens_by = _token_rules(folder)  # fingerprint of the tokenizer whose ids are there, if any are
        pairs = map(token_paths, shards) if self.tokens_by is not None else ()
        self._tokens = [(_open_array(tokens), _open_array(ends)) for tokens, ends in pairs]

    def __len__(self) -> int:
        return len(self._table)

    def token_ids(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The retriever's token ids in the order asked for; only where `tokens_by` names its tokenizer."""
        rows = np.asarray(rows)
        shards = np.searchsorted(self._starts, rows, "right") - 1
        self._require(shards, are_tokens=True)
        places = (rows - self._starts[shards]).tolist()
        return [
            tokens[int(ends[place - 1]) if place else 0 : int(ends[place])]
            for (tokens, ends), place in zip((self._tokens[shard] for shard in shards.tolist()), places, strict=True)
        ]

    def texts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Texts in the order asked for."""
        return self._columns(rows)["text"]

    def sources(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """What each document was cut from, in the order asked for."""
        return self._columns(rows)["source"]

    def documents(self, rows: Sequence[int] | np.ndarray) -> list[Document]:
        columns = self._columns(rows)
        return [Document(*values) for values in zip(*(columns[name] for name in DOCUMENT_SCHEMA.names), strict=True)]

    def iterate(self) -> Iterator[Document]:
        """All documents in row order, a batch in memory at a time."""
        for start in range(0, len(self), ROWS_PER_BATCH):
            yield from self.documents(range(start, min(start + ROWS_PER_BATCH, len(self))))

    def num_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each document's text; the texts themselves are not read."""
        return _num_bytes(self._table, "text")

    def _columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, list[str]]:
        """The columns of some rows, whose shards are compared with their checksums first."""
        self._require(np.searchsorted(self._starts, np.asarray(rows), "right") - 1)
        return self._table[[int(row) for row in rows]]

    def _require(self, shards: np.ndarray, are_tokens: bool = False) -> None:
        for shard in np.unique(shards).tolist():
            path = self._shards[shard]
            for file in token_paths(path) if are_tokens else (path,):
                self._files.require(f"{file.parent.name}/{file.name}")

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Row numbers of the documents with these ids; ids that are not there are left out."""
        self._require(np.arange(len(self._shards)))
        column = self._table.data.column("id")
        rows = np.flatnonzero(pc.is_in(column, value_set=pa.array(sorted(set(ids)), column.type)))
        return dict(zip(column.take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True))


class ExampleStore:
    """Training or held-out texts by row number. Raises UserError for a file that is not what its set says of it."""

    def __init__(self, path: Path) -> None:
        CheckedFiles(path.parent).require(path.name, WITHOUT_PROOF)
        self._table = _open_table(path, EXAMPLE_SCHEMA)

    def __len__(self) -> int:
        return len(self._table)

    def num_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each text, context and continuation together; the texts themselves are not read."""
        return _num_bytes(self._table, "context") + _num_bytes(self._table, "continuation")

    def gold(self) -> dict[str, str]:
        """Documents that texts name as gold, each with the id of a text that does."""
        lists = self._table.data.column("gold")
        texts = self._table.data.column("id").take(pc.list_parent_indices(lists))
        return dict(zip(pc.list_flatten(lists).to_pylist(), texts.to_pylist(), strict=True))

    def examples(self, rows: Sequence[int] | np.ndarray | None = None) -> list[Example]:
        """Texts in the order asked for; all of them by default."""
        columns = self._table[:] if rows is None else self._table[[int(row) for row in rows]]
        fields = zip(*(columns[name] for name in EXAMPLE_SCHEMA.names), strict=True)
        return [Example(*texts, tuple(gold)) for *texts, gold in fields]  # type: ignore[call-arg]


def _num_bytes(table: Dataset, column: str) -> np.ndarray:
    return pc.binary_length(table.data.column(column)).to_numpy()


def _token_rules(folder: Path) -> str | None:
    path = folder / TOKEN_RULES
    try:
        return json.loads(path.read_text())["fingerprint"] if path.is_file() else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); {FIX}") from error


def _open_array(path: Path) -> np.ndarray:
    """Mapped by Arrow, which keeps no descriptor: numpy would keep two for each shard of a corpus."""
    try:
        with reading(path), pa.memory_map(str(path)) as file:
            content = pa.BufferReader(file.read_buffer())
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        return np.frombuffer(content.read_buffer(), dtype).reshape(shape)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); {FIX}") from error


def _open_table(path: Path, schema: pa.Schema) -> Dataset:
    try:
        table = Dataset.from_file(str(path))
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the system's; Arrow's own have no number
            raise
        raise UserError(f"{path} is damaged, it is no Arrow file ({error}); prepare it again") from error
    if table.column_names != schema.names:
        raise UserError(f"{path} is damaged, its columns are {', '.join(table.column_names)}; prepare it again")
    return table


class Corpus(Protocol):
    """What an index is built of: documents, the file that holds them, and its hash."""

    corpus: CorpusStore

    @property
    def corpus_path(self) -> Path: ...

    @property
    def corpus_sha256(self) -> str: ...


class ImportedCorpus:
    """Documents without texts to train on: documents/ and, written last, corpus.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = CorpusStore(self.corpus_path)
        self.manifest: dict[str, Any] = read_mark(folder / "corpus.json")

    @property
    def corpus_path(self) -> Path:
        return self.folder / "documents"

    @property
    def corpus_sha256(self) -> str:
        return str(self.manifest["sha256"])


class PreparedSet:
    """A finished prepared set; raises UserError for one that is unfinished or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        _require_files(folder, self.manifest)
        self.corpus = CorpusStore(self.corpus_path)
        self.queries, self.heldout = (ExampleStore(folder / name) for name in TEXTS)
        self.dev = ExampleStore(folder / DEV) if DEV in self.manifest["files"] else None

    @property
    def texts(self) -> tuple[ExampleStore, ...]:
        """Every split of texts that there is."""
        return (self.queries, self.heldout, *([self.dev] if self.dev is not None else []))

    def require_dev(self) -> ExampleStore:
        """The development texts. Raises UserError where the set has none."""
        if self.dev is None:
            raise UserError(
                f"{self.folder} has no development texts; prepare a set with data.num_dev (raw texts) or data.dev "
                "(your own rows)"
            )
        return self.dev

    @property
    def corpus_path(self) -> Path:
        return self.folder / "documents"

    @property
    def corpus_sha256(self) -> str:
        shards = (name.partition("/") for name in self.manifest["files"] if name.endswith(".arrow"))
        hashes = {name: self.manifest["files"][f"{folder}/{name}"] for folder, _, name in shards if name}
        return combined_sha256(hashes)


def read_manifest(folder: Path) -> dict:
    """The manifest of a finished set; raises UserError where it is no such thing."""
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder} is not a prepared set: manifest.json is missing; run `replug prepare` again")
    manifest = read_mark(folder / "manifest.json")
    proof = manifest.get("disjoint")
    if not isinstance(proof, dict) or not {"shared_sources", "equal_texts"} <= proof.keys():
        raise UserError(f"{folder}/manifest.json holds no proof of disjointness; {FIX}")
    if not isinstance(manifest.get("files"), dict):
        raise UserError(f"{folder}/manifest.json lists no files; {FIX}")
    if proof["shared_sources"] or proof["equal_texts"]:
        raise UserError(f"{folder}/manifest.json says that corpus and texts overlap; {FIX}")
    return manifest


def _require_files(folder: Path, manifest: dict) -> None:
    for name in (*manifest["files"], *TEXTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}/{name} is missing; {FIX}")
    for name in TEXTS:  # otherwise the proof would be of any texts
        if name not in manifest["files"]:
            raise UserError(f"{folder}/manifest.json has no checksum of {name}; {FIX}")


def is_prepared_set(folder: Path) -> bool:
    """True for a folder whose manifest holds a proof of disjointness, or that is still being prepared."""
    try:
        return "disjoint" in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return (folder / "work" / "plan.json").is_file() or (folder / "queries.arrow").is_file()


def verify_prepared(folder: Path) -> tuple[list[str], list[str]]:
    """A line of what is there, and a line for each thing that is wrong: checksums, counts."""
    try:
        manifest = read_manifest(folder)
        problems = list(_file_problems(folder, manifest["files"]))  # first, since what is damaged may not open
        prepared = None if problems else PreparedSet(folder)
    except UserError as error:
        return [], [str(error)]
    counts = manifest["counts"]
    if prepared is not None:
        held = {"documents": len(prepared.corpus), "queries": len(prepared.queries), "heldout": len(prepared.heldout)}
        held |= {"dev": len(prepared.dev)} if prepared.dev is not None else {}
        problems += [
            f"{folder} holds {number} {split}, its manifest says {counts[split]}"
            for split, number in held.items()
            if number != counts[split]
        ]
    said = ", ".join(f"{count} {split}" for split, count in counts.items())
    found = [f"{folder}: {said}, {'all intact' if not problems else f'wrong in {len(problems)} places'}"]
    known = {*manifest["files"], "manifest.json"}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if others := [name for name in names if name not in known and not name.startswith(("work/", "."))]:
        found.append(f"{folder}: not checked, since no checksum of it is known: {', '.join(others)}")
    return found, problems


def _file_problems(folder: Path, files: dict[str, str]) -> Iterator[str]:
    progress = Progress(f"checking {folder}", len(files))
    for name, sha256 in files.items():
        for line in wrong_files(folder, {name: sha256}):
            yield f"{line}; {FIX}"
        progress.advance()
