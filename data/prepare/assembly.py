"""From sorted runs of pieces to the files of a set: the second half of preparing.

Held-out texts are chosen first, then development texts and queries that overlap none before them, then documents that
overlap no text: what is measured is worth most, and of documents there are most. Each split is the pieces of smallest
keys, in their order.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from replug.data.files import file_sha256, write_json
from replug.data.hashing import hash64
from replug.data.prepare.cutting import KINDS
from replug.data.prepare.overlap_filter import OverlapFilter
from replug.data.prepare.sorted_runs import iterate, read_range
from replug.data.records import Document, Window
from replug.data.shards import DOCUMENT_SCHEMA, read_documents_of, token_paths, write_rows, write_token_ids
from replug.data.tokenizing import TokenIds, ids_of_texts, load_plain

ROWS_AT_A_TIME = 1000
PIECE_NAMES = {"documents": "document", "queries": "query", "heldout": "held-out text", "dev": "development text"}


@dataclass(frozen=True, slots=True)
class AssemblyRules:
    """What every shard of documents is made from."""

    source_shards: list[str]  # folders of their runs
    duplicates: str  # .npy: hashes of ids that occur twice, and the version that is kept
    overlap_filters: str  # folder
    token_ids: TokenIds | None

    def runs(self, split: str) -> list[Path]:
        return [
            run for source_shard in self.source_shards for run in sorted(Path(source_shard).glob(f"{split}-*.arrow"))
        ]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What became of a range of keys: `kept` pieces, of which the shard holds `rows`."""

    number: int
    kept: int
    rows: int
    dropped: dict[str, int]
    domains: dict[str, int]
    files: dict[str, str]  # names and sha256

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> "ShardReport":
        return ShardReport(**json.loads(path.read_text()))


def write_shard(
    rules_file: Path, out: Path, number: int, keys: tuple[int, int], limit: int | None, mark: Path
) -> ShardReport:
    """Write the documents of a range of keys, at most `limit`, with their token ids; marked when whole."""
    rules, dropped = load_rules(rules_file), Counter[str]()
    overlap_filter = OverlapFilter.load(Path(rules.overlap_filters) / "windows")
    chosen = [
        Document(row["id"], row["text"], row["domain"], row["source"])
        for row in chosen_pieces(rules, "documents", keys, overlap_filter, dropped)
    ]
    kept, chosen = len(chosen), chosen[:limit]
    path = out / f"{number:05d}.arrow"
    write_rows(path, DOCUMENT_SCHEMA, chosen)
    files = [path]
    if rules.token_ids is not None:
        write_ids_of(path, chosen, rules.token_ids)
        files += token_paths(path)
    domains = Counter(doc.domain for doc in chosen)
    hashes = {file.name: file_sha256(file) for file in files}
    report = ShardReport(number, kept, len(chosen), dict(dropped), dict(sorted(domains.items())), hashes)
    report.write(mark)
    return report


def write_ids_of_shard(shard: Path, rule: TokenIds) -> None:
    """Token ids beside the texts of a shard that is there."""
    write_ids_of(shard, list(read_documents_of(shard)), rule)


def write_ids_of(shard: Path, documents: list[Document], rule: TokenIds) -> None:
    tokenizer = _loaded_tokenizer(rule.tokenizer)
    ids = [
        row
        for start in range(0, len(documents), ROWS_AT_A_TIME)
        for row in ids_of_texts(tokenizer, rule, [doc.text for doc in documents[start : start + ROWS_AT_A_TIME]])
    ]
    write_token_ids(shard, ids, rule.dtype)


def choose_windows(
    rules: AssemblyRules,
    split: str,
    ranges: list[tuple[int, int]],
    asked: int,
    overlap_filter: OverlapFilter,
    dropped: Counter,
) -> Iterator[Window]:
    """The first `asked` texts of a split, in the order of their keys."""
    found = 0
    for keys in ranges:
        for row in chosen_pieces(rules, split, keys, overlap_filter, dropped):
            if found == asked:
                return
            found += 1
            yield Window(row["id"], row["context"], row["continuation"], row["domain"], row["source"])


def chosen_pieces(
    rules: AssemblyRules, split: str, keys: tuple[int, int], overlap_filter: OverlapFilter, dropped: Counter
) -> Iterator[dict]:
    """The pieces of a range in order; what repeats another, or is in the overlap filter, is dropped and counted."""
    table = read_range(rules.runs(split), KINDS[split], *keys)
    table = table.filter(is_kept_version(table, np.load(rules.duplicates, mmap_mode="r", allow_pickle=False)))
    what = PIECE_NAMES[split]
    last, last_id = b"", ""
    for row in iterate(table):
        if row["digest"] == last:
            dropped[f"repeated {what}"] += row["id"] != last_id  # the same id: a text that came twice, counted there
            continue
        last, last_id = row["digest"], row["id"]
        if overlap_filter.knows_text(row["key"], row.get("tail")):
            dropped[f"{what} equal to another split's text"] += 1
        elif overlap_filter.knows_ngram(row["text"] if split == "documents" else row["context"] + row["continuation"]):
            dropped[f"{what} that shares {overlap_filter.n} words with another split's text"] += 1
        else:
            yield row


def is_kept_version(table: pa.Table, duplicates: np.ndarray) -> pa.Array:
    """For each row whether its source text is the one that is kept among those of the same id."""
    if not len(duplicates):
        return pa.array(np.ones(len(table), bool))
    ids = np.array([hash64(source) for source in table.column("source").to_pylist()], np.uint64)
    versions = table.column("version").to_numpy()
    places = np.minimum(np.searchsorted(duplicates["id"], ids), len(duplicates) - 1)
    loses = (duplicates["id"][places] == ids) & (duplicates["version"][places] != versions)
    return pa.array(~loses)


def load_rules(path: Path) -> AssemblyRules:
    return _parse_rules(path.read_text())


@lru_cache(1)
def _parse_rules(text: str) -> AssemblyRules:
    row = json.loads(text)
    return AssemblyRules(**{**row, "token_ids": TokenIds(**row["token_ids"]) if row["token_ids"] else None})


@lru_cache(1)
def _loaded_tokenizer(tokenizer: str) -> Tokenizer:
    return load_plain(tokenizer)
