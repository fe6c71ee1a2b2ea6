"""Cut a source shard into sorted runs of pieces: the first half of preparing, on any worker, in any order.

A source shard writes a sorted run of each split for every six million characters, so any range of keys can be read
alone. It also registers every text, so that `reading` finds ids that occur twice.
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

from replug.data.files import write_json, writing
from replug.data.prepare.prose import Prose, points_elsewhere
from replug.data.sampling import SPLITS, Shares, buckets, piece_key, split_of
from replug.data.sources.records import EXAMPLES, FieldMap, Rejected, SourceShard, SourceText
from replug.data.sources.texts import read_items
from replug.data.tokenizing import TokenIds, load_plain, pieces_within, split_text, token_ends
from replug.data.words import content_hash, hash64

# A row of a run. `version` is the hash of the whole text that a piece was cut from; a piece for the corpus has no
# continuation. A text may come twice in two domains.
PIECES = pa.schema(
    [
        *(("key", pa.uint64()), ("digest", pa.binary(16)), ("version", pa.uint64())),
        *((name, pa.string()) for name in ("id", "domain", "source", "text", "continuation")),
    ]
)
ORDER = [(name, "ascending") for name in ("key", "digest", "version", "id", "domain")]

Piece = dict[str, Any]  # a row of these columns

_loaded_tokenizer = lru_cache(2)(load_plain)


def write_pieces(path: Path, pieces: list[Piece]) -> None:
    """Sort pieces and write them as one batch: its keys can be searched without reading the texts."""
    table = pa.Table.from_pylist(pieces, schema=PIECES).sort_by(ORDER).combine_chunks()
    with writing(path), pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_range(runs: Iterable[Path], low: int, high: int) -> pa.Table:
    """Return all pieces with low <= key < high, in the order of their keys, for any order of the runs."""
    parts = [PIECES.empty_table()]
    for run in runs:
        with pa.memory_map(str(run)) as source:  # copied out and closed: there may be thousands of runs
            batch = pa.ipc.open_file(source).get_batch(0)
            keys = batch.column("key").to_numpy()
            start, stop = np.searchsorted(keys, np.uint64(low)), np.searchsorted(keys, np.uint64(high - 1), "right")
            if start < stop:
                parts.append(pa.Table.from_batches([batch.take(pa.array(np.arange(start, stop)))]))
    merged = pa.concat_tables(parts).sort_by(ORDER)
    parts.clear()
    pa.default_memory_pool().release_unused()  # else a worker's memory grows from range to range
    return merged


def iterate(table: pa.Table) -> Iterator[dict]:
    """Yield rows of a table, a batch at a time as Python objects."""
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


# The texts with an id: hashes of the id and of the words, and the place.
REGISTRY = np.dtype([("id", np.uint64), ("version", np.uint64), ("source_shard", np.int64), ("line", np.int64)])
CHARACTERS_AT_A_TIME = 1 << 19  # texts that are tokenized together
RUN_CHARACTERS = 6 << 20  # of pieces in memory, for any size of source shard


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The tokenizer that cuts (JSON), how the retriever reads documents, and the LM's limits, where they are known.

    `lm` is the LM's tokenizer as JSON. With it, pieces cut by another tokenizer, with perhaps longer tokens, are
    cut further to the LM's limits.
    """

    cut: str
    token_ids: TokenIds | None = None
    lm: str | None = None
    lm_document_tokens: int = 0
    lm_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of all workers for reading, dealing, cutting and tokenizing texts."""

    fields: FieldMap
    shares: Shares
    seed: int
    context_tokens: int
    document_tokens: int
    tokenizers: Tokenizers


@dataclass
class SourceShardReport:
    """The outcome of cutting a source shard: its number of `lines`, and pieces by split and bucket of keys."""

    number: int
    texts: int = 0
    lines: int = 0
    counts: dict[str, Counter] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    dropped: Counter = field(default_factory=Counter)
    rejected: Counter = field(default_factory=Counter)
    examples: list[Rejected] = field(default_factory=list)

    def write(self, path: Path) -> None:
        write_json(path, {**vars(self), "examples": [asdict(case) for case in self.examples]})

    @staticmethod
    def read(path: Path) -> "SourceShardReport":
        row = json.loads(path.read_text())
        row["examples"] = [Rejected(**case) for case in row["examples"]]
        for split, counts in row["counts"].items():
            row["counts"][split] = {int(bucket): count for bucket, count in counts.items()}
        return SourceShardReport(**row)


def cut_source_shard(
    rules: Rules, folder: Path, source_shard: SourceShard, limits: dict[str, int]
) -> SourceShardReport:
    """Cut a source shard into runs; pieces in a bucket above their split's limit are dropped."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt
    folder.mkdir(parents=True)
    cut = _SourceShardCut(rules, folder, limits, source_shard.number)
    texts: list[SourceText] = []  # not yet cut
    size = 0
    for line, item in read_items(source_shard, rules.fields):
        cut.report.lines = max(cut.report.lines, line)
        if isinstance(item, Rejected):
            cut.reject(item)
        elif item is not None:
            cut.register(item, line)
            texts.append(item)
            size += len(item.text)
            if size > CHARACTERS_AT_A_TIME:
                cut.add(texts)
                texts, size = [], 0
    cut.add(texts)
    cut.write_runs()
    cut.report.write(folder / "report.json")
    return cut.report


class _SourceShardCut:
    """The state of cutting one source shard."""

    def __init__(self, rules: Rules, folder: Path, limits: dict[str, int], number: int) -> None:
        self.report = SourceShardReport(number)
        self._rules, self._folder, self._limits = rules, folder, limits
        self._registry: list[tuple[int, int, int, int]] = []
        self._pieces: dict[str, list[Piece]] = {split: [] for split in SPLITS}
        self._characters = self._runs = 0
        self._tokenizer = _loaded_tokenizer(rules.tokenizers.cut)
        self._lm_tokenizer = _loaded_tokenizer(rules.tokenizers.lm) if rules.tokenizers.lm else None

    def reject(self, case: Rejected) -> None:
        self.report.rejected[case.reason] += 1
        if self.report.rejected[case.reason] <= EXAMPLES:
            self.report.examples.append(case)

    def register(self, text: SourceText, line: int) -> None:
        """Count a text."""
        self.report.texts += 1
        if text.named:  # else its words are its id
            self._registry.append((hash64(text.id), hash64(text.text), self.report.number, line))

    def add(self, texts: Sequence[SourceText]) -> None:
        """Cut texts into pieces of their splits."""
        for text, ends in zip(texts, token_ends(self._tokenizer, [t.text for t in texts]), strict=True):
            split = split_of(text.id, self._rules.seed, self._rules.shares)
            parts = self._parts(text, ends, split)
            if split == "documents":
                pairs = [(part, "") for part in parts]
            else:
                pairs = list(zip(parts[::2], parts[1::2], strict=False))
                if not pairs:
                    self.report.dropped["text shorter than two examples"] += 1
            self._keep(split, text, pairs)
        if self._characters > RUN_CHARACTERS:
            self.write_runs()

    def write_runs(self) -> None:
        """Write one run for each split, and the register of the texts that were read."""
        for split, pieces in self._pieces.items():
            if pieces:
                write_pieces(self._folder / f"{split}-{self._runs:04d}.arrow", pieces)
                self._pieces[split] = []
        registry = np.array(self._registry, REGISTRY)
        with writing(path := self._folder / f"texts-{self._runs:04d}.npy"):
            np.save(path, registry, allow_pickle=False)
        self._registry, self._characters = [], 0
        self._runs += 1

    def _parts(self, text: SourceText, token_ends: Sequence[int], split: str) -> list[str]:
        """Return the documents of a text, or its contexts and continuations in turn."""
        limit = self._rules.document_tokens if split == "documents" else self._rules.context_tokens
        if not text.is_prose:
            parts = self._bounded(split, split_text(text.text, token_ends, limit))
            return parts if split == "documents" else parts[:-1]  # the last part is shorter than the rest
        prose = Prose(text.text, token_ends)
        if split != "documents":
            return self._bounded(split, [part for pair in self._kept(split, prose.examples(limit)) for part in pair])
        titled = self._kept(split, prose.documents(limit))
        return self._bounded(split, [f"{title}\n{body}" if title else body for title, body in titled])

    def _kept(self, split: str, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Yield pieces of prose; count and drop short pieces and mere pointers."""
        what = "document" if split == "documents" else "example"
        for first, second in pairs:
            if not second:
                self.report.dropped[f"{what} that is too short"] += 1
            elif points_elsewhere(second if split == "documents" else first + second):
                self.report.dropped[f"{what} that only points elsewhere"] += 1
            else:
                yield first, second

    def _bounded(self, split: str, parts: list[str]) -> list[str]:
        """Cut the pieces that the LM cannot hold, which are few."""
        if self._lm_tokenizer is None:
            return parts
        limits = self._rules.tokenizers
        limit = limits.lm_document_tokens if split == "documents" else limits.lm_context_tokens
        return [piece for pieces in pieces_within(self._lm_tokenizer, parts, limit) for piece in pieces]

    def _keep(self, split: str, text: SourceText, pairs: Sequence[tuple[str, str]]) -> None:
        """Count the pieces of a text, and keep pieces within the split's limit. Documents have no continuation."""
        digests = [content_hash("".join(pair), self._rules.seed) for pair in pairs]
        keys = np.array([piece_key(digest) for digest in digests], np.uint64)
        version = hash64(text.text)
        for number, (pair, digest, bucket) in enumerate(zip(pairs, digests, buckets(keys).tolist(), strict=True)):
            if not all(part.strip() for part in (pair[:1] if split == "documents" else pair)):
                self.report.dropped["blank document" if split == "documents" else "blank text"] += 1
                continue
            self.report.counts[split][bucket] += 1
            if bucket <= self._limits[split]:
                named = {"id": f"{text.id}#{number}", "domain": text.domain, "source": text.id, "version": version}
                words = {"text": pair[0], "continuation": pair[1]}
                self._pieces[split].append({"key": piece_key(digest), "digest": digest, **named, **words})
                self._characters += len(pair[0]) + len(pair[1])
