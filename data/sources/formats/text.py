"""Files that each hold one text, or many with `data.new_text_at`: a source shard is some of the files of a tree.

A text is called by its path below the tree's root; the first folder of that path is its domain.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from replug.data.sources.format import Format
from replug.data.sources.records import FieldMap, Item, SourceShard, SourceText
from replug.data.sources.rejected import Reason, Rejected
from replug.data.sources.row_texts import checked_text, joined_texts


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
        text = _file_text(name)
        if isinstance(text, Rejected):
            yield 0, text
        elif fields.new_text_at:
            lines = ((number, {"text": line}) for number, line in enumerate(io.StringIO(text), start=1))
            yield from joined_texts(lines, FieldMap(max_characters=fields.max_characters), name, fields.new_text_at)
        else:
            yield 0, checked_text(_named(name, source_shard.root, text), fields, name, 0)


def _named(name: str, root: str, text: str) -> SourceText:
    label = Path(name).relative_to(root) if root else Path(Path(name).name)
    return SourceText(str(label), text, label.parts[0] if len(label.parts) > 1 else "all")


def _file_text(name: str) -> str | Rejected:
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        return Rejected(Reason.unreadable_file, name, 0, error.strerror or str(error))
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Rejected(Reason.not_utf8, name, 0, "UTF-16; convert or remove the file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Rejected(Reason.not_utf8, name, 0, f"at byte {error.start}; convert or remove the file")


FORMAT = Format("text", _plan, _read, suffixes=(".txt", ".md", ".rst", ".tokens", ".raw"), holds_rows=False)
