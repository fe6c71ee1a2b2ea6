"""Files that each hold one text, or many with `data.new_text_at`: a source shard is some of the files of a tree.

A text is called by its path below the tree's root; the first folder of that path is its domain. No more of a file is
in memory than one text may have.
"""

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from replug.data.sources.formats import Format
from replug.data.sources.lines import UNREADABLE, open_file, skip_line
from replug.data.sources.records import FieldMap, Item, Reason, Rejected, Row, SourceShard, SourceText
from replug.data.sources.row_texts import checked_text, joined_texts

BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8
READ_BYTES = 1 << 20


def plan_tree(paths: Iterable[Path], root: str, shard_bytes: int) -> Iterator[SourceShard]:
    """Files in their order, some to a source shard."""
    names: list[str] = []
    size = 0
    for path in paths:
        names.append(str(path))
        size += path.stat().st_size
        if size >= shard_bytes:
            yield SourceShard(0, "text", tuple(names), size, root=root)
            names, size = [], 0
    if names:
        yield SourceShard(0, "text", tuple(names), size, root=root)


def _plan(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    yield SourceShard(0, "text", (path,), Path(path).stat().st_size)


def _read(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    for name in source_shard.names:
        if (problem := _file_problem(name)) is not None:
            yield 0, problem
        elif fields.new_text_at:
            limits = FieldMap(max_characters=fields.max_characters)
            yield from joined_texts(_lines(name, fields.max_characters), limits, name, fields.new_text_at)
        else:
            yield 0, _whole(name, source_shard.root, fields)


def _whole(name: str, root: str, fields: FieldMap) -> SourceText | Rejected:
    most = BYTES_OF_A_CHARACTER * (fields.max_characters + 1)  # a byte order mark among them
    with open_file(Path(name)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        return Rejected(Reason.too_long, name, 0, f"over {most} bytes, more than data.max_text_characters can be")
    return checked_text(_named(name, root, content.decode("utf-8-sig")), fields, name, 0)


def _lines(name: str, max_characters: int) -> Iterator[Row]:
    """Of one that is longer than a text may be, a part that is so as well."""
    most = BYTES_OF_A_CHARACTER * (max_characters + 2)
    with open_file(Path(name)) as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if len(line) == most and not line.endswith(b"\n"):
                skip_line(file)
            yield number, {"text": line.decode("utf-8-sig" if number == 1 else "utf-8", errors="ignore")}


def _named(name: str, root: str, text: str) -> SourceText:
    label = Path(name).relative_to(root) if root else Path(Path(name).name)
    return SourceText(str(label), text, label.parts[0] if len(label.parts) > 1 else "all")


def _file_problem(name: str) -> Rejected | None:
    """Why a file is no text, found without holding it."""
    try:
        with open_file(Path(name)) as file:
            return _not_utf8(file, name)
    except UNREADABLE as error:
        return Rejected(Reason.unreadable_file, name, 0, getattr(error, "strerror", None) or str(error))


def _not_utf8(file: BinaryIO, name: str) -> Rejected | None:
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        part = file.read(READ_BYTES)
        if done == 0 and part.startswith((b"\xff\xfe", b"\xfe\xff")):
            return Rejected(Reason.not_utf8, name, 0, "UTF-16; convert or remove the file")
        waiting = len(decoder.getstate()[0])
        try:
            decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            at = done - waiting + error.start
            return Rejected(Reason.not_utf8, name, 0, f"at byte {at}; convert or remove the file")
        if not part:
            return None
        done += len(part)


FORMAT = Format("text", _plan, _read, suffixes=(".txt", ".md", ".rst", ".tokens", ".raw"), holds_rows=False)
