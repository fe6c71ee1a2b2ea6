"""From a source shard to sorted runs of pieces: the first half of preparing, on any worker, in any order.

A source shard writes a sorted run of each split for about every six million characters, so that none is ever in memory
as a whole, and any range of keys can be read alone. It also registers every text as (hash of its id, hash of its words,
line), by which `reading` finds ids that occur twice.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replug.data.files import file_sha256, write_json, writing
from replug.data.hashing import content_hash, hash64
from replug.data.sampling import SPLITS, Shares, buckets, piece_key, split_of
from replug.data.sources.records import EXAMPLES, FieldMap, Passed, Reason, Rejected, SourceShard, SourceText
from replug.data.sources.shards import read_with_passed
from replug.data.tokenizing import load_plain, pieces_within, split_text, token_offsets

# The columns of runs, for pieces that may become documents, and for those that may become texts of another split.
# `version` is the hash of the whole text that a piece was cut from, `tail` the key of its continuation alone.
_HEAD = [("key", pa.uint64()), ("digest", pa.binary(16)), ("id", pa.string())]
_FROM = [("domain", pa.string()), ("source", pa.string()), ("version", pa.uint64())]
DOCUMENT_PIECES = pa.schema([*_HEAD, ("text", pa.string()), *_FROM])
TEXT_PIECES = pa.schema(
    [*_HEAD, ("context", pa.string()), ("continuation", pa.string()), *_FROM, ("tail", pa.uint64())]
)
SCHEMAS = {split: DOCUMENT_PIECES if split == "documents" else TEXT_PIECES for split in SPLITS}
ORDER = [("key", "ascending"), ("digest", "ascending"), ("version", "ascending"), ("id", "ascending")]
ORDER += [("domain", "ascending")]  # a text may come twice in two domains

Piece = dict[str, Any]  # a row of these columns

_loaded_tokenizer = lru_cache(2)(load_plain)  # not those of `assembly`, which truncate


def write_run(path: Path, pieces: list[Piece], schema: pa.Schema) -> None:
    """Sort pieces and write them as one batch, whose keys can be searched without reading the texts."""
    table = pa.Table.from_pylist(pieces, schema=schema).sort_by(ORDER).combine_chunks()
    with writing(path), pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_range(runs: Iterable[Path], schema: pa.Schema, low: int, high: int) -> pa.Table:
    """All pieces with low <= key < high, in the order of their keys, whatever the order of the runs."""
    found = [schema.empty_table()]
    for run in runs:
        part = _slice(run, low, high)
        if part is not None:
            found.append(part)
    merged = pa.concat_tables(found).sort_by(ORDER)
    found.clear()
    pa.default_memory_pool().release_unused()  # else a worker's memory grows from range to range
    return merged


def _slice(run: Path, low: int, high: int) -> pa.Table | None:
    """Copied out of the mapped file, which is closed again: there may be thousands."""
    with pa.memory_map(str(run)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        keys = batch.column("key").to_numpy()
        start = int(np.searchsorted(keys, np.uint64(low)))
        stop = len(keys) if high >= 2**64 else int(np.searchsorted(keys, np.uint64(high)))
        if start == stop:
            return None
        return pa.Table.from_batches([batch.take(pa.array(np.arange(start, stop)))])


def iterate(table: pa.Table) -> Iterator[dict]:
    """Rows of a table, a batch at a time as Python objects."""
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


REGISTRY = np.dtype([("id", np.uint64), ("version", np.uint64), ("line", np.int64), ("named", np.bool_)])
CHARACTERS_AT_A_TIME = 1 << 19  # texts that are tokenized together
RUN_CHARACTERS = 6 << 20  # of pieces in memory: a worker never holds more, however much a source shard gives


@dataclass(frozen=True, slots=True)
class LMBound:
    """What the LM can hold of a piece that is cut by another's tokens: a word of any length may be one of those."""

    tokenizer: str  # the LM's own, as JSON
    document_tokens: int
    context_tokens: int

    def tokens_of(self, split: str) -> int:
        return self.document_tokens if split == "documents" else self.context_tokens


@dataclass(frozen=True, slots=True)
class CutRules:
    """How texts are read, dealt to the splits and cut."""

    fields: FieldMap
    tokenizer: str  # JSON
    context_tokens: int
    document_tokens: int
    seed: int
    shares: Shares
    bound: LMBound | None = None

    def tokens_of(self, split: str) -> int:
        return self.document_tokens if split == "documents" else self.context_tokens


@dataclass(frozen=True, slots=True)
class SourceShardReport:
    """What became of a source shard: its number of `lines`, and `counts` of pieces by bucket of keys."""

    number: int
    texts: int
    tokens: int
    lines: int
    domains: dict[str, dict[str, int]]
    dropped: dict[str, int]
    rejected: dict[str, int]
    examples: list[Rejected]
    counts: dict[str, dict[int, int]]
    files: dict[str, str]  # names and sha256
    cut_further: int = 0  # pieces that the LM could not have held

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> "SourceShardReport":
        row = json.loads(path.read_text())
        row["examples"] = [Rejected(Reason(case.pop("reason")), **case) for case in row["examples"]]
        row["counts"] = {
            split: {int(bucket): count for bucket, count in counts.items()} for split, counts in row["counts"].items()
        }
        return SourceShardReport(**row)


def cut_source_shard(
    rules_file: Path, folder: Path, source_shard: SourceShard, limits: dict[str, int]
) -> SourceShardReport:
    """Cut a source shard into runs under `folder`; pieces in a bucket above their split's limit are left out."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted try left
    folder.mkdir(parents=True)
    cut = _SourceShardCut(load_rules(rules_file), folder, limits)
    for texts in _batches(source_shard, cut):
        cut.add(texts)
    report = cut.finish(source_shard)
    report.write(folder / "report.json")
    return report


def load_rules(path: Path) -> CutRules:
    return _parse_rules(path.read_text())


@lru_cache(1)
def _parse_rules(text: str) -> CutRules:
    row = json.loads(text)
    parts = {"fields": FieldMap(**row["fields"]), "shares": Shares(**row["shares"])}
    return CutRules(**{**row, **parts, "bound": LMBound(**row["bound"]) if row["bound"] else None})


def _batches(source_shard: SourceShard, cut: "_SourceShardCut") -> Iterator[list[SourceText]]:
    """Texts that serve a split, about half a million characters at a time; the rest is counted."""
    texts: list[SourceText] = []
    size = 0
    for line, item in read_with_passed(source_shard, cut.rules.fields):
        cut.lines = max(cut.lines, line)
        if isinstance(item, Passed):
            continue
        if isinstance(item, Rejected):
            cut.reject(item)
        elif cut.register(item, line):
            texts.append(item)
            size += len(item.text)
        if size > CHARACTERS_AT_A_TIME:
            yield texts
            texts, size = [], 0
    yield texts


@dataclass
class _SourceShardCut:
    """The state of cutting one source shard."""

    rules: CutRules
    folder: Path
    limits: dict[str, int]
    texts: int = 0
    tokens: int = 0
    lines: int = 0
    runs: int = 0
    files: list[str] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    rejected: Counter = field(default_factory=Counter)
    examples: list[Rejected] = field(default_factory=list)
    registry: list[tuple] = field(default_factory=list)
    domains: dict[str, Counter] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    counts: dict[str, Counter] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    pieces: dict[str, list] = field(default_factory=lambda: {split: [] for split in SPLITS})
    characters: int = 0
    cut_further: int = 0

    def __post_init__(self) -> None:
        self._tokenizer = _loaded_tokenizer(self.rules.tokenizer)
        self._lm_tokenizer = _loaded_tokenizer(self.rules.bound.tokenizer) if self.rules.bound else None

    def reject(self, case: Rejected) -> None:
        self.rejected[case.reason.value] += 1
        if self.rejected[case.reason.value] <= EXAMPLES:
            self.examples.append(case)

    def register(self, text: SourceText, line: int) -> bool:
        """Count a text; True if it serves a split."""
        self.texts += 1
        self.registry.append((hash64(text.id), hash64(text.text), line, text.named))
        return split_of(text.id, self.rules.seed, self.rules.shares) is not None

    def add(self, texts: Sequence[SourceText]) -> None:
        for text, offsets in zip(texts, token_offsets(self._tokenizer, [t.text for t in texts]), strict=True):
            split = split_of(text.id, self.rules.seed, self.rules.shares)
            assert split is not None
            self.tokens += len(offsets)
            parts = self._bounded(split, split_text(text.text, offsets, self.rules.tokens_of(split)))
            self._keep(
                split, list(self._documents(text, parts) if split == "documents" else self._examples(text, parts))
            )
        if self.characters > RUN_CHARACTERS:
            self._write_runs()

    def finish(self, source_shard: SourceShard) -> SourceShardReport:
        self._write_runs()
        return SourceShardReport(
            number=source_shard.number,
            texts=self.texts,
            tokens=self.tokens,
            lines=self.lines,
            domains={split: dict(sorted(counts.items())) for split, counts in self.domains.items()},
            dropped=dict(self.dropped),
            rejected=dict(self.rejected),
            examples=self.examples,
            counts={split: dict(sorted(counts.items())) for split, counts in self.counts.items()},
            files={name: file_sha256(self.folder / name) for name in self.files},
            cut_further=self.cut_further,
        )

    def _bounded(self, split: str, parts: list[str]) -> list[str]:
        """Pieces that the LM can hold; all but a few are as they were."""
        if self.rules.bound is None or self._lm_tokenizer is None:
            return parts
        found = pieces_within(self._lm_tokenizer, parts, self.rules.bound.tokens_of(split))
        self.cut_further += sum(len(pieces) > 1 for pieces in found)
        return [piece for pieces in found for piece in pieces]

    def _documents(self, text: SourceText, parts: list[str]) -> Iterator[Piece]:
        version = hash64(text.text)
        for number, part in enumerate(parts):
            if not part.strip():
                self.dropped["blank document"] += 1
                continue
            digest = content_hash(part, self.rules.seed)
            yield {
                "key": piece_key(digest),
                "digest": digest,
                "id": f"{text.id}#{number}",
                "text": part,
                "domain": text.domain,
                "source": text.id,
                "version": version,
            }

    def _examples(self, text: SourceText, parts: list[str]) -> Iterator[Piece]:
        version = hash64(text.text)
        parts = parts[:-1]  # the last part is shorter than the rest
        if len(parts) < 2:
            self.dropped["text shorter than two examples"] += 1
        for number, (context, continuation) in enumerate(zip(parts[::2], parts[1::2], strict=False)):
            if not context.strip() or not continuation.strip():
                self.dropped["blank text"] += 1
                continue
            digest = content_hash(context + continuation, self.rules.seed)
            yield {
                "key": piece_key(digest),
                "digest": digest,
                "id": f"{text.id}#{number}",
                "context": context,
                "continuation": continuation,
                "domain": text.domain,
                "source": text.id,
                "version": version,
                "tail": piece_key(content_hash(continuation, self.rules.seed)),
            }

    def _keep(self, split: str, pieces: list[Piece]) -> None:
        if not pieces:
            return
        places = buckets(np.array([piece["key"] for piece in pieces], np.uint64))
        self.counts[split].update(places.tolist())
        self.domains[split][pieces[0]["domain"]] += len(pieces)
        kept = [piece for piece, place in zip(pieces, places, strict=True) if place <= self.limits[split]]
        self.pieces[split] += kept
        parts = ("text",) if split == "documents" else ("context", "continuation")
        self.characters += sum(len(piece[part]) for piece in kept for part in parts)

    def _write_runs(self) -> None:
        """One run for each split, and who was read."""
        for split, pieces in self.pieces.items():
            if pieces:
                write_run(self._new_file(f"{split}-{self.runs:04d}.arrow"), pieces, SCHEMAS[split])
                self.pieces[split] = []
        write_registry(self._new_file(f"texts-{self.runs:04d}.npy"), self.registry)
        self.registry, self.characters = [], 0
        self.runs += 1

    def _new_file(self, name: str) -> Path:
        self.files.append(name)
        return self.folder / name


def write_registry(path: Path, texts: Sequence[tuple[int, int, int, bool]]) -> None:
    """Write who was read: hash of the id, hash of the words, line, and whether the id was given."""
    registry = np.sort(np.array(list(texts), REGISTRY), order=("id", "version", "line"))
    with writing(path):
        np.save(path, registry, allow_pickle=False)
