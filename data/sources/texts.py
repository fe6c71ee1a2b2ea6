"""Whole texts out of a source: of rows, of files of text, and of packages. Rejected ones come with their reasons.

A file of a tree of texts holds one text, or many with `data.new_text_at`. A text is called by its path below the tree's
root; the first folder of that path is its domain. No more of a file is in memory than one text may have.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from replug.data.sources.built_in_texts import read_package_texts, stand_in_texts
from replug.data.sources.formats import READERS, read_shard
from replug.data.sources.lines import UNREADABLE, format_of, open_file, other_format, read_lines, unpacked_suffix
from replug.data.sources.markup import MainTexts, main_texts, plain_markup
from replug.data.sources.records import (
    FieldMap,
    Item,
    Reason,
    Rejected,
    Row,
    SourceShard,
    SourceText,
    names_in,
    nested,
    readable_name,
)
from replug.data.words import content_hash

PACKAGE = "package:"
PROSE = ("text", "markup", "HTML")
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8
MAX_NAME_CHARACTERS = 4096  # of an id or a domain, which are kept for every piece of a text


def read_items(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    """Yield the texts of a source shard with their lines; 0 stands for the whole file.

    Unreadable rows and files come as `Rejected`, and lines that are not rows as None, so that all are counted.
    """
    name = source_shard.names[0]
    if has_rows(source_shard):
        rows = read_shard(source_shard, (fields.text, fields.id, fields.domain))
        if fields.new_text_at:
            yield from _joined_texts(rows, fields, name, fields.new_text_at)
        else:
            for number, row in rows:
                yield number, _text_of_row(row, fields, name, number) if isinstance(row, dict) else row
    elif source_shard.kind == "text":
        yield from _read_files(source_shard, fields)
    else:
        texts = stand_in_texts() if name == "stand_in" else read_package_texts(name.removeprefix(PACKAGE))
        yield from enumerate(texts, start=1)


def has_rows(source_shard: SourceShard) -> bool:
    """Return whether a source shard is read row by row."""
    return source_shard.kind == "parquet" or source_shard.kind in READERS


def is_built_in(source: str) -> bool:
    """Return whether a source is texts that come with this package or another."""
    return source == "stand_in" or source.startswith(PACKAGE)


# Rows -------------------------------------------------------------------------------------------------------


def _text_of_row(row: dict[str, Any], fields: FieldMap, name: str, line: int) -> SourceText | Rejected:
    text, identifier, domain = (nested(row, path) for path in (fields.text, fields.id, fields.domain))
    if text is None:
        detail = f"field '{fields.text}' (data.fields) is missing; the fields: {names_in(row)}"
        return Rejected(Reason.text_missing, name, line, detail)
    if not isinstance(text, str):
        detail = f"field '{fields.text}' must be a string, found {type(text).__name__}"
        return Rejected(Reason.text_not_a_string, name, line, detail)
    if problem := _name_problem(identifier, fields.id, Reason.id_not_a_string, "a string or an integer"):
        return Rejected(problem[0], name, line, problem[1])
    if problem := _name_problem(domain, fields.domain, Reason.domain_not_a_string, "a string"):
        return Rejected(problem[0], name, line, problem[1])
    domain = "all" if domain in (None, "") else str(domain)
    made = _unnamed(text, domain) if identifier is None else SourceText(str(identifier), text, domain)
    return _checked(made, fields, name, line)


def _name_problem(value: Any, field: str, reason: Reason, expected: str) -> tuple[Reason, str] | None:
    """Return what is wrong with an id or a domain, None where it is fine."""
    if value == "" and reason is Reason.id_not_a_string:
        return Reason.id_empty, f"field '{field}' (data.fields) is empty"
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        return reason, f"field '{field}' must be {expected}, found {type(value).__name__}"
    if isinstance(value, str) and len(value) > MAX_NAME_CHARACTERS:
        return Reason.too_long, f"field '{field}' has {len(value)} characters, more than {MAX_NAME_CHARACTERS}"
    return None


def _unnamed(text: str, domain: str) -> SourceText:
    """Return a text that nobody named under a hash of its words, so that its split depends on no order of files."""
    return SourceText(content_hash(text.encode(errors="replace").decode()).hex(), text, domain, named=False)


def _checked(text: SourceText, fields: FieldMap, name: str, line: int) -> SourceText | Rejected:
    if not text.text.strip():
        return Rejected(Reason.text_empty, name, line, "the text is empty")
    if len(text.text) > fields.max_characters:
        return _too_long(name, line, len(text.text))
    if "\0" in text.text:
        return Rejected(Reason.nul_character, name, line, "holds a NUL character: is it a text?")
    try:
        f"{text.id}{text.domain}{text.text}".encode()
    except UnicodeEncodeError:
        return Rejected(Reason.half_surrogate, name, line, "holds half a surrogate pair")
    return text


def _too_long(name: str, line: int, num_characters: int) -> Rejected:
    return Rejected(Reason.too_long, name, line, f"{num_characters} characters, more than a text may have")


def _joined_texts(rows: Iterator[Row], fields: FieldMap, name: str, new_text_at: str) -> Iterator[Item]:
    """Join rows that are lines of longer texts, as Wikitext's: a text begins where a line matches.

    No more of a text is in memory than it may have.
    """
    begins, lines, length, first = re.compile(new_text_at), list[str](), 0, 0

    def joined() -> Iterator[Item]:
        """Yield the text so far; none of blank lines, which stand before the next."""
        if length > fields.max_characters:
            yield first, _too_long(name, first, length)
        elif any(line.strip() for line in lines):
            yield first, _checked(_unnamed("".join(lines), "all"), fields, name, first)

    for number, row in rows:
        if not isinstance(row, dict):
            yield number, row
            continue
        yield number, None
        line = nested(row, fields.text)
        if not isinstance(line, str):
            yield number, _text_of_row(row, fields, name, number)
            continue
        if begins.search(line) and (text := list(joined())):
            yield from text
            lines, length = [], 0
        first = number if length == 0 else first
        lines.append(line if line.endswith("\n") else f"{line}\n")
        length += len(lines[-1])
        if length > fields.max_characters:
            lines.clear()
    yield from joined()


# Files of text ----------------------------------------------------------------------------------------------


def _read_files(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    with ExitStack() as stack:
        has_pages = any(format_of(Path(name)) == "HTML" for name in source_shard.names)
        pages = stack.enter_context(main_texts()) if has_pages else None
        for name in source_shard.names:
            is_page = format_of(Path(name)) == "HTML"
            if fields.new_text_at and not is_page:
                limits = FieldMap(max_characters=fields.max_characters)
                yield from _joined_texts(_lines_of(name), limits, name, fields.new_text_at)
            else:
                yield 0, _whole(name, source_shard.root, fields, pages if is_page else None)


def _lines_of(name: str) -> Iterator[Row]:
    for number, line in read_lines(SourceShard("text", (name,))):
        try:
            yield number, line if isinstance(line, Rejected) else {"text": line.decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            yield number, _not_utf8(name, number, error)


def _whole(name: str, root: str, fields: FieldMap, pages: MainTexts | None = None) -> SourceText | Rejected:
    """Return the text of a file, read as a page where `pages` are given."""
    most = BYTES_OF_A_CHARACTER * (fields.max_characters + 1)  # a byte order mark among them
    try:
        with open_file(Path(name)) as file:
            content = file.read(most + 1)
        if len(content) > most:
            return Rejected(Reason.too_long, name, 0, f"over {most} bytes, more than a text may have")
        text = content.decode().removeprefix("\ufeff") if pages is None else pages(content)
    except UnicodeDecodeError as error:
        return _not_utf8(name, 0, error)
    except UNREADABLE as error:
        return Rejected(Reason.unreadable_file, name, 0, getattr(error, "strerror", None) or str(error))
    if text is None:
        return Rejected(Reason.no_main_text, name, 0, "no main text was found in the page")
    if not text.strip():
        return Rejected(Reason.empty_file, name, 0, "the file is empty")
    label, kind = text_id(name, root), format_of(Path(name))
    domain = label.partition("/")[0] if "/" in label else "all"
    if kind in PROSE:
        text = text.replace("\r\n", "\n").replace("\f", "\n")  # the ends of lines, and of a PDF's pages
        text = text if kind == "HTML" else plain_markup(text, unpacked_suffix(Path(name)))
    return _checked(SourceText(label, text, domain, is_prose=kind in PROSE), fields, name, 0)


def _not_utf8(name: str, line: int, error: UnicodeDecodeError) -> Rejected:
    at = other_format(Path(name)) or f"at byte {error.start}{' of the line' if line else ''}"
    return Rejected(Reason.not_utf8, name, line, f"{at}; convert the file, or leave it out of the source")


def text_id(name: str, root: str) -> str:
    """Return what a file of a tree of texts is called: its path below the root, without bytes that are not UTF-8."""
    return readable_name(str(Path(name).relative_to(root)) if root else Path(name).name)
