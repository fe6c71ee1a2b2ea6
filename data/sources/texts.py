"""Read whole texts from a source: rows, files of text, and packages. Rejections come with their reasons.

A file of a tree of texts holds one text, or many with `data.new_text_at`. The id of a text is its path below the tree's
root, its domain the first folder of that path. Memory holds at most one text of a file.

Markdown is read without comments and front matter. HTML goes through the extractor process of `replug ask` (extra
`web`), since pages here are as hostile, and becomes Markdown.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from replug.config.errors import require_extra
from replug.data.sources.built_in_texts import read_package_texts, stand_in_texts
from replug.data.sources.formats import READERS, read_shard
from replug.data.sources.records import (
    UNREADABLE,
    FieldMap,
    Item,
    Rejected,
    Row,
    SourceShard,
    SourceText,
    format_of,
    names_in,
    nested,
    open_file,
    read_lines,
    readable_name,
)
from replug.data.words import content_hash

MainTexts = Callable[[bytes], str | None]  # None if a page has no main text or times out
PACKAGE = "package:"
PROSE = ("text", "markup", "HTML")
MAX_CHARACTERS = 16 << 20  # of a text
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8


def read_items(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    """Yield the texts of a source shard with their lines; 0 stands for the whole file.

    Unreadable rows and files give `Rejected`, and lines that are not rows None, so that all are counted.
    """
    name = source_shard.names[0]
    if source_shard.kind in READERS:
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


def is_built_in(source: str) -> bool:
    """Return whether a source is texts of this or another installed package."""
    return source == "stand_in" or source.startswith(PACKAGE)


# Rows -------------------------------------------------------------------------------------------------------


def _text_of_row(row: dict[str, Any], fields: FieldMap, name: str, line: int) -> SourceText | Rejected:
    def rejected(reason: str, detail: str) -> Rejected:
        return Rejected(reason, name, line, detail)

    text, identifier, domain = (nested(row, path) for path in (fields.text, fields.id, fields.domain))
    if text is None:
        detail = f"field '{fields.text}' (data.fields) is missing; the fields: {names_in(row)}"
        return rejected("text_missing", detail)
    if not isinstance(text, str):
        return rejected("text_not_a_string", f"field '{fields.text}' must be a string, found {type(text).__name__}")
    for value, field in ((identifier, fields.id), (domain, fields.domain)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
            found = type(value).__name__
            return rejected("not_a_string", f"field '{field}' must be a string or an integer, found {found}")
    domain = "all" if domain in (None, "") else str(domain)
    made = _unnamed(text, domain) if identifier in (None, "") else SourceText(str(identifier), text, domain)
    return _checked(made, name, line)


def _unnamed(text: str, domain: str) -> SourceText:
    """Return an unnamed text with a hash of its words as id, so that its split depends on no order of files."""
    return SourceText(content_hash(text.encode(errors="replace").decode()).hex(), text, domain, named=False)


def _checked(text: SourceText, name: str, line: int) -> SourceText | Rejected:
    if not text.text.strip():
        return Rejected("text_empty", name, line, "the text is empty")
    if len(text.text) > MAX_CHARACTERS:
        return _too_long(name, line, len(text.text))
    try:
        f"{text.id}{text.domain}{text.text}".encode()
    except UnicodeEncodeError:
        return Rejected("half_surrogate", name, line, "holds half a surrogate pair")
    return text


def _too_long(name: str, line: int, num_characters: int) -> Rejected:
    return Rejected("too_long", name, line, f"{num_characters} characters, more than a text may have")


def _joined_texts(rows: Iterator[Row], fields: FieldMap, name: str, new_text_at: str) -> Iterator[Item]:
    """Join rows that are lines of longer texts, as Wikitext's: a text begins at a matching line.

    Memory holds at most the maximum length of a text.
    """
    begins, lines, length, first = re.compile(new_text_at), list[str](), 0, 0

    def joined() -> Iterator[Item]:
        """Yield the text so far, unless all lines are blank: they then belong to the next text."""
        if length > MAX_CHARACTERS:
            yield first, _too_long(name, first, length)
        elif any(line.strip() for line in lines):
            yield first, _checked(_unnamed("".join(lines), "all"), name, first)

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
        if length > MAX_CHARACTERS:
            lines.clear()
    yield from joined()


# Files of text ----------------------------------------------------------------------------------------------


def _read_files(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    has_pages = any(format_of(Path(name)) == "HTML" for name in source_shard.names)
    with main_texts() if has_pages else nullcontext() as pages:
        for name in source_shard.names:
            is_page = format_of(Path(name)) == "HTML"
            if fields.new_text_at and not is_page:
                lines = read_lines(SourceShard("text", (name,)))
                rows: Iterator[Row] = ((at, {"text": of} if isinstance(of, str) else of) for at, of in lines)
                yield from _joined_texts(rows, FieldMap(), name, fields.new_text_at)
            else:
                yield 0, _whole(name, source_shard.root, pages if is_page else None)


def _whole(name: str, root: str, pages: MainTexts | None = None) -> SourceText | Rejected:
    """Return the text of a file, read as a page if `pages` is given."""
    most = BYTES_OF_A_CHARACTER * (MAX_CHARACTERS + 1)  # a byte order mark among them
    try:
        with open_file(Path(name)) as file:
            content = file.read(most + 1)
        if len(content) > most:
            return Rejected("too_long", name, 0, f"over {most} bytes, more than a text may have")
        text = content.decode().removeprefix("\ufeff") if pages is None else pages(content)
    except UnicodeDecodeError as error:
        return Rejected("not_utf8", name, 0, f"not UTF-8 at byte {error.start}; convert the file, or leave it out")
    except UNREADABLE as error:
        return Rejected("unreadable_file", name, 0, getattr(error, "strerror", None) or str(error))
    if text is None:
        return Rejected("no_main_text", name, 0, "no main text was found in the page")
    if not text.strip():
        return Rejected("empty_file", name, 0, "the file is empty")
    label, kind = text_id(name, root), format_of(Path(name))
    domain = label.partition("/")[0] if "/" in label else "all"
    if kind in PROSE:
        text = text.replace("\r\n", "\n").replace("\f", "\n")  # the ends of lines, and of a PDF's pages
        text = markdown_of(text) if kind == "markup" else text
    return _checked(SourceText(label, text, domain, is_prose=kind in PROSE), name, 0)


def text_id(name: str, root: str) -> str:
    """Return the id of a file's text: its path below the root, with bytes that are not UTF-8 spelt out."""
    return readable_name(str(Path(name).relative_to(root)) if root else Path(name).name)


# Markup -------------------------------------------------------------------------------------------------------------

FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*\n", re.DOTALL)
FRONT_TITLE = re.compile(r"^title:[ \t]*[\"']?(.*?)[\"']?[ \t]*$", re.MULTILINE)


def markdown_of(text: str) -> str:
    """Return Markdown without comments and front matter; its title becomes the first heading."""
    text = _without_comments(text)
    if (front := FRONT_MATTER.match(text)) is None:
        return text
    title = FRONT_TITLE.search(front[1])
    return (f"# {title[1]}\n\n" if title and title[1] else "") + text[front.end() :]


def _without_comments(text: str) -> str:
    """Search in linear time: a regular expression would scan to the end for every unclosed comment."""
    kept, place = [], 0
    while (start := text.find("<!--", place)) >= 0 and (end := text.find("-->", start)) >= 0:
        kept.append(text[place:start])
        place = end + len("-->")
    return "".join([*kept, text[place:]])


def require_html(source: str) -> None:
    """Raise UserError if a module that reads HTML is missing."""
    modules = ("trafilatura", "lxml_html_clean", "charset_normalizer", "httpcore", "protego")
    require_extra("web", *modules, what=f"data.source: {source} has HTML files, and reading them")


@contextmanager
def main_texts() -> Iterator[MainTexts]:
    """Start the process that reads pages; it ends with the block."""
    from replug.web.extraction import Extractor, FetchFailed, decode_page

    with closing(Extractor(with_headings=True)) as extractor:

        def read(body: bytes) -> str | None:
            try:
                text, title = extractor.extract(decode_page(body, ""))
            except FetchFailed:
                return None
            return text if text.startswith("#") or not title else f"# {title}\n\n{text}"

        yield read
