"""Plan source shards of about 16 MB, which any worker can read alone, without reading the source.

A source shard is a range of bytes of JSON Lines or of a table with tabs, another or compressed file, some row groups of
a Parquet file, some files of a tree of texts, one shard of a dataset on the hub, or all of a built-in source.

If a folder, or a pattern with `*`, has files of rows, only these are read, unless there are more bytes of prose (text,
Markdown, reStructuredText, HTML): then each file of prose is a text. Without either, each file is a text, except binary
ones, `.json` and `.csv`; a folder mostly of the latter two is refused. A warning names the files left aside, but not
hidden files and folders of tools (`node_modules`).

A hash of the names and contents of its files identifies a source.
"""

import hashlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import UserError
from replug.config.paths import is_here
from replug.config.schema import DataConfig
from replug.data.files import file_sha256
from replug.data.sources.formats import (
    READERS,
    ROWS_AT_A_TIME,
    TABS,
    field_names,
    form_of,
    named_split,
    plan_hub,
    read_shard,
)
from replug.data.sources.records import (
    FieldMap,
    SourceShard,
    first_bytes,
    format_of,
    names_in,
    nested,
    other_format,
    packing_of,
)
from replug.data.sources.texts import PROSE, is_built_in, require_html, text_id

log = logging.getLogger(__name__)

SOURCE_SHARD_BYTES, LEAST_SHARD_BYTES = 16 << 20, 1 << 18
TREE_SHARDS = 8  # of a folder of texts, if they are not too small; progress is logged after each
TOOLS_FOLDERS = ("node_modules", "__pycache__")
LEAST_FILES = 10  # of a tree of texts
SHOWN = 5  # names of files in a message; the manifest has all
ROWS, DATA = ("jsonl", "tsv", "parquet"), ("json", "CSV")  # data may hold rows, and is never one text
EXPECTED = "a file of rows, a folder or a dataset's name"


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The shards of a source, the files `left_aside`, and the field names of the first rows."""

    shards: list[SourceShard]
    fields: FieldMap
    left_aside: tuple[str, ...] = ()
    field_names: tuple[str, ...] = ()

    @property
    def text_ids(self) -> list[str]:
        """Return the ids of a folder's texts, one for each file; none for other sources."""
        if self.shards[0].kind != "text" or self.fields.new_text_at or not self.shards[0].root:
            return []
        return [text_id(name, shard.root) for shard in self.shards for name in shard.names]

    def say(self, key: str) -> None:
        """Warn of unread files."""
        files = len({name for shard in self.shards for name in shard.names})
        if aside := self.left_aside:
            read = f"{files:,} {'texts' if self.shards[0].kind == 'text' else 'files of rows'}"
            names = ", ".join([*aside[:SHOWN], *(["..."] if len(aside) > SHOWN else [])])
            shown = f"{names} ({len(aside):,} in all: {_by_suffix(aside)})"
            log.warning(f"{key}: left aside beside {read}: {shown}. A pattern such as 'DIR/**/*.py' reads others")


def plan_texts(data: DataConfig) -> SourcePlan:
    """Return the plan of `data.source`.

    Raises UserError for too few files, since each text belongs to one split, and for rows without texts.
    """
    plan = plan_source(str(data.source), FieldMap.of(data.fields, data.new_text_at))
    if data.train is None and plan.text_ids and (count := len(plan.text_ids)) < LEAST_FILES:
        raise UserError(
            f"data.source: {data.source} holds {count} texts, and each is of one split alone (corpus, training, "
            f"development, held-out); expected at least {LEAST_FILES} files, better hundreds: divide long ones, such "
            "as into chapters, or give rows or questions of your own as data.train and data.heldout"
        )
    names = plan.field_names
    if names and plan.fields.text.partition(".")[0] not in names:
        raise UserError(
            f"data.source: {data.source} has rows of {names_in(names)} and no '{plan.fields.text}'; expected texts: "
            "data.fields={NAME: text}, or give questions as data.train and data.heldout"
        )
    return plan


def _by_suffix(names: Iterable[str]) -> str:
    suffixes = Counter(Path(name).suffix or "without a suffix" for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(SHOWN))


def plan_source(source: str, fields: FieldMap) -> SourcePlan:
    """Return the plan of a `data.source`; a file is one shard if texts run over many of its lines.

    Raises UserError for a source without files that can be read.
    """
    planned: Iterable[SourceShard] = [SourceShard("built_in", (source,))]
    left_aside: list[str] = []
    if (paths := files_of(source)) is not None:
        planned, left_aside = _plan_files(source, paths, fields)
    elif not is_built_in(source):
        planned = plan_hub(source)
    shards = [replace(shard, number=number) for number, shard in enumerate(planned)]
    if not shards:
        holds = f"no texts, but {_by_suffix(left_aside)}: extract their text first" if left_aside else "no files"
        raise UserError(f"data.source: {source} holds {holds}")
    names = field_names(shards[0]) if shards[0].kind in READERS else ()
    return SourcePlan(shards, fields, tuple(left_aside), tuple(names))


def of_split(source: str, split: str) -> str:
    """Return the source, with this split added if it is a dataset of the hub without one."""
    return named_split(source, split) if not is_built_in(source) and files_of(source) is None else source


def source_fingerprint(source: str, fields: FieldMap) -> str | None:
    """Hash the names and contents of the files to read; None for a built-in source or a dataset of the hub."""
    if (paths := files_of(source)) is None:
        return None
    paths, _ = _read_of(source, paths, fields)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(os.fsencode(path.name) + f" {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def source_bytes(source: str, fields: FieldMap) -> int | None:
    """Return the bytes of the files that are read; None for a built-in source or a dataset of the hub."""
    paths = files_of(source)
    return None if paths is None else _num_bytes(_read_of(source, paths, fields)[0])


def _plan_files(source: str, paths: list[Path], fields: FieldMap) -> tuple[Iterable[SourceShard], list[str]]:
    """Return the shards of a source, and the names of files that are left aside."""
    read, are_rows = _read_of(source, paths, fields)
    if not are_rows and any(format_of(path) == "HTML" for path in read):
        require_html(source)
    data = [] if are_rows else [path for path in paths if format_of(path) in DATA]
    if 0 < len(data) >= len(read) and _num_bytes(read) <= _num_bytes(data):  # such as a data set and its card
        found = names_in(field_names(SourceShard(form_of(data[0]), (str(data[0]),))))
        raise UserError(
            f"data.source: {data[0]} has no rows with '{fields.text}' (found: {found}); expected one on each line or "
            "in each object of an array: data.fields={NAME: text} names another field"
        )
    before, kept = source.partition("*")[0], set(read)
    # The base of relative names: for a pattern, the folder before its `*`.
    root = Path(before).expanduser() if before == source or before.endswith("/") else Path(before).expanduser().parent
    is_file = Path(source).expanduser().is_file()
    left_aside = [] if is_file else [str(path.relative_to(root)) for path in paths if path not in kept]
    linked = (path for path in root.rglob("*") if path.is_symlink() and path.is_dir() and not _is_hidden(path, root))
    left_aside += [f"{path.relative_to(root)}/" for path in linked]
    if are_rows:
        shard_bytes = None if fields.new_text_at else SOURCE_SHARD_BYTES
        return (shard for path in read for shard in _plan_rows(path, shard_bytes)), left_aside
    if is_file:
        return [SourceShard("text", (str(read[0]),))], left_aside
    part_bytes = min(SOURCE_SHARD_BYTES, max(LEAST_SHARD_BYTES, _num_bytes(read) // TREE_SHARDS))
    parts = _parts([path.stat().st_size for path in read], part_bytes)
    names = [str(path) for path in read]
    return [SourceShard("text", tuple(names[first:end]), root=str(root)) for first, end in parts], left_aside


def _read_of(source: str, paths: list[Path], fields: FieldMap) -> tuple[list[Path], bool]:
    """Return the files to read, and whether they hold rows: files of rows unless prose has more bytes."""
    rows = [path for path in paths if _holds_rows(path, fields)]
    if Path(source).expanduser().is_file():
        return paths, bool(rows) or format_of(paths[0]) not in PROSE
    prose = sorted(path for path in set(paths) - set(rows) if format_of(path) in PROSE)
    if rows and _num_bytes(rows) >= _num_bytes(prose):
        return rows, True
    return prose or [path for path in paths if format_of(path) not in DATA and not other_format(path)], False


def _holds_rows(path: Path, fields: FieldMap) -> bool:
    """Return whether a file holds rows.

    The suffix decides for tables with tabs, Parquet and JSON Lines; reading reports their bad rows. Other data holds
    rows if one of its first rows has a text; a text or a file without a suffix, such as Spark's, if it is JSON and its
    first row has a text.
    """
    kind = format_of(path)
    if kind in ROWS or kind in ("markup", "HTML"):
        return kind in ROWS
    is_json = first_bytes(path).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    if not is_json and (kind not in DATA or other_format(path)):
        return False
    rows = (row for _, row in read_shard(SourceShard(form_of(path), (str(path),))) if row is not None)
    first = itertools.islice(rows, ROWS_AT_A_TIME if kind in DATA else 1)
    return any(isinstance(row, dict) and nested(row, fields.text) is not None for row in first)


def _plan_rows(path: Path, shard_bytes: int | None) -> Iterable[SourceShard]:
    """Return the source shards of a file of rows, about `shard_bytes` each; None means one, for texts of many rows.

    Raises UserError if the first bytes of the file identify a format without rows.
    """
    whole = SourceShard(form_of(path), (str(path),))
    if shard_bytes is None or whole.kind not in ("parquet", "jsonl", TABS) or packing_of(path):
        return [whole]
    if whole.kind == "parquet":
        try:
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError):  # reading the source shard reports it
            return [whole]
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        return [replace(whole, start=first, stop=end) for first, end in _parts(sizes, shard_bytes)]
    size = path.stat().st_size
    starts = range(0, max(size, 1), shard_bytes)
    return [replace(whole, start=start, stop=min(start + shard_bytes, size)) for start in starts]


def _parts(sizes: Sequence[int], part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of parts in a row, of about `part_bytes` each."""
    first = size = 0
    for end, own in enumerate(sizes, start=1):
        size += own
        if size >= part_bytes or end == len(sizes):
            yield first, end
            first, size = end, 0


def _num_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") or part in TOOLS_FOLDERS for part in path.relative_to(folder).parts)


def files_of(source: str) -> list[Path] | None:
    """Return the files of a source in a fixed order. None means that it names no files."""
    path = Path(source).expanduser()
    if is_built_in(source):
        return None
    if "*" in source:
        anchor = Path(path.anchor)
        matching = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
        if not matching:
            raise UserError(f"data.source: no file matches {source}")
        return matching
    if path.is_dir():
        found = [file for file in path.rglob("*") if not _is_hidden(file, path)]
        if broken := [file for file in found if not file.exists() and format_of(file)]:
            raise UserError(f"data.source: {broken[0]} is a link to nothing: is the download complete?")
        return sorted(file for file in found if file.is_file())
    if path.is_file():
        return [path]
    if not is_here("data.source", source, EXPECTED) and format_of(path):
        raise UserError(f"data.source: {source} does not exist; expected {EXPECTED}")
    return None
