"""`replug prepare`: raw texts, or the user's own rows, to a prepared set with its proof of disjointness.

A source text serves the corpus, the queries or the held-out set by a keyed hash of its id, so no
source is on two sides whatever the order of files. Pieces equal to a piece of another side are dropped
and counted. The user's own rows are never changed: an overlap there is refused.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from configs.errors import UserError
from configs.schema import DataConfig
from data.chunks import split_text
from data.disjoint import content_hash, prove_disjoint, require_disjoint, window_hashes
from data.progress import Progress, say
from data.records import Document, Window
from data.rows import read_documents, read_windows
from data.sources import FieldMap, SourceText, read_source
from data.store import (
    FILES,
    CorpusStore,
    ImportedCorpus,
    PreparedSet,
    file_sha256,
    write_documents,
    write_json,
    write_windows,
)

Piece = TypeVar("Piece", Document, Window)
Origin = dict[str, object]  # the keys, and hashes of files, that a set was made from


class Tokenizer(Protocol):
    """Character offsets (start, end) of a text's tokens."""

    def __call__(self, text: str) -> list[tuple[int, int]]: ...


@dataclass
class Pieces:
    """What cutting has given so far."""

    documents: list[Document] = field(default_factory=list)
    queries: list[Window] = field(default_factory=list)
    heldout: list[Window] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)


def prepare_raw(config: DataConfig, seed: int, tokenizer: Tokenizer, out: Path, origin: Origin) -> PreparedSet:
    """Cut `data.source` into a prepared set under `out`; `origin` is written down with it."""
    assert config.source is not None
    fields = FieldMap(config.text_field, config.id_field, config.domain_field)
    pieces = _cut_all(read_source(config.source, fields), config, seed, tokenizer)
    _drop_equal_texts(pieces)
    _trim(pieces, config, seed)
    say(f"cut into {_counts(pieces)}")
    if not (pieces.documents and pieces.queries and pieces.heldout):
        raise UserError(
            f"data.source: {config.source} gives {_counts(pieces)}; expected some of each: give more or longer "
            "texts, a smaller data.window, or other shares"
        )
    return _write_set(out, pieces.documents, pieces.queries, pieces.heldout, dict(pieces.dropped), origin)


def prepare_rows(corpus: Path, queries: Path, heldout: Path, out: Path, origin: Origin) -> PreparedSet:
    """Check and import the user's own documents and texts."""
    return _write_set(out, read_documents(corpus), read_windows(queries), read_windows(heldout), {}, origin)


def import_corpus(corpus: Path, out: Path) -> ImportedCorpus:
    """The user's own documents alone, for an index without training; what was imported before serves again."""
    origin = file_sha256(corpus)
    if (out / "corpus.json").is_file():
        imported = ImportedCorpus(out)
        if imported.manifest["origin"] != origin:
            raise UserError(
                f"{out} was imported from other documents than {corpus}: remove it, or give another index.out"
            )
        return imported
    out.mkdir(parents=True, exist_ok=True)
    write_documents(out / "documents.arrow", read_documents(corpus))
    write_json(out / "corpus.json", {"sha256": file_sha256(out / "documents.arrow"), "origin": origin})
    return ImportedCorpus(out)


def require_same_origin(prepared: PreparedSet, origin: Origin) -> PreparedSet:
    """A set that lies there already serves only if it was made from the same; raises UserError otherwise."""
    before = prepared.manifest.get("origin", {})
    for key in sorted({*before, *origin}):
        if before.get(key) != origin.get(key):
            raise UserError(
                f"{prepared.folder} was prepared with {key}={before.get(key)}, now it is {origin.get(key)}: remove the "
                "folder or give another data.out"
            )
    return prepared


def side_of(source_id: str, seed: int, query_share: float, heldout_share: float) -> str:
    """`queries`, `heldout` or `corpus`, by a keyed hash of the source's id."""
    point = _hash_fraction(source_id, f"side:{seed}")
    if point < query_share:
        return "queries"
    return "heldout" if point < query_share + heldout_share else "corpus"


def _hash_fraction(text: str, key: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def _cut_all(texts: Iterable[SourceText], config: DataConfig, seed: int, tokenizer: Tokenizer) -> Pieces:
    pieces = Pieces()
    texts = list(texts)
    progress = Progress("cutting texts", len(texts))
    for text in texts:
        side = side_of(text.id, seed, config.query_share, config.heldout_share)
        if side == "corpus":
            _add_documents(pieces, text, config.document_tokens or config.window, tokenizer)
        else:
            _add_windows(pieces, getattr(pieces, side), text, config.window, tokenizer)
        progress.advance(note=text.domain)
    return pieces


def _add_documents(pieces: Pieces, text: SourceText, tokens: int, tokenizer: Tokenizer) -> None:
    for number, piece in enumerate(split_text(text.text, tokenizer(text.text), tokens)):
        if not piece.strip():
            pieces.dropped["blank document"] += 1
            continue
        pieces.documents.append(Document(f"{text.id}#{number}", piece, text.domain, text.id))


def _add_windows(pieces: Pieces, side: list[Window], text: SourceText, tokens: int, tokenizer: Tokenizer) -> None:
    halves = split_text(text.text, tokenizer(text.text), tokens)
    halves = halves[:-1]  # the last piece is shorter than the rest
    for number, (context, continuation) in enumerate(zip(halves[::2], halves[1::2], strict=False)):
        if not context.strip() or not continuation.strip():
            pieces.dropped["blank text"] += 1
            continue
        side.append(Window(f"{text.id}#{number}", context, continuation, text.domain, text.id))


def _drop_equal_texts(pieces: Pieces) -> None:
    """Drop windows that equal a document, held-out texts that equal a query, and repeated documents."""
    documents: dict[bytes, Document] = {}
    for doc in pieces.documents:
        documents.setdefault(content_hash(doc.text), doc)
    pieces.dropped["repeated document"] += len(pieces.documents) - len(documents)
    pieces.documents = list(documents.values())
    pieces.queries = list(_keep_unless(pieces, pieces.queries, set(documents), "query equal to a document"))
    seen = set(documents) | {window_hashes(window)[0] for window in pieces.queries}
    pieces.heldout = list(_keep_unless(pieces, pieces.heldout, seen, "held-out text equal to another side's"))


def _keep_unless(pieces: Pieces, windows: list[Window], seen: set[bytes], reason: str) -> Iterator[Window]:
    for window in windows:
        if seen.intersection(window_hashes(window)):
            pieces.dropped[reason] += 1
        else:
            yield window


def _trim(pieces: Pieces, config: DataConfig, seed: int) -> None:
    """Keep the asked number on each side, by hash, so that domains keep their proportions."""
    pieces.documents = _smallest_hashes(pieces.documents, config.num_documents, seed)
    pieces.queries = _smallest_hashes(pieces.queries, config.num_queries, seed)
    pieces.heldout = _smallest_hashes(pieces.heldout, config.num_heldout, seed)


def _smallest_hashes(items: list[Piece], limit: int | None, seed: int) -> list[Piece]:
    ordered = sorted(items, key=lambda item: _hash_fraction(item.id, f"sample:{seed}"))
    return ordered[:limit]


def _counts(pieces: Pieces) -> str:
    sizes = (len(pieces.documents), len(pieces.queries), len(pieces.heldout))
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(pieces.dropped.items()) if count)
    return "{} documents, {} queries, {} held-out texts".format(*sizes) + (f" (dropped: {dropped})" if dropped else "")


def _write_set(
    out: Path,
    documents: Iterable[Document],
    queries: list[Window],
    heldout: list[Window],
    dropped: dict[str, int],
    origin: Origin,
) -> PreparedSet:
    """Write the files, prove them disjoint from what was written, and mark the set as finished."""
    _clear(out)
    write_documents(out / "documents.arrow", documents)
    write_windows(out / "queries.arrow", queries)
    write_windows(out / "heldout.arrow", heldout)
    proof = prove_disjoint(CorpusStore(out / "documents.arrow").iterate(), queries, heldout)
    say(str(proof))
    require_disjoint(proof)
    write_json(
        out / "manifest.json",
        {
            "counts": {"documents": proof.num_documents, "queries": len(queries), "heldout": len(heldout)},
            "domains": _domains(queries, heldout),
            "dropped": dropped,
            "origin": origin,
            "disjoint": proof.to_json(),
            "files": {name: file_sha256(out / name) for name in FILES},
        },
    )
    return PreparedSet(out)


def _clear(out: Path) -> None:
    """Make room for a set: an earlier one goes, anything else of the user's stays and is named."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give another data.out")
    ours = {*FILES, "manifest.json", "manifest.json.partial"}
    foreign = [path.name for path in out.iterdir() if path.name not in ours] if out.exists() else []
    if foreign:
        raise UserError(f"{out} holds {foreign[0]}, which is no part of a prepared set; give another data.out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _domains(queries: list[Window], heldout: list[Window]) -> dict[str, dict[str, int]]:
    sides = {"queries": queries, "heldout": heldout}
    return {name: dict(Counter(window.domain for window in windows)) for name, windows in sides.items()}
