"""Texts out of rows: a text for each row, or one for many. What is wrong with a row is handed on with its reason."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replug.data.hashing import content_hash
from replug.data.sources.records import FieldMap, Item, Reason, Rejected, Row, SourceText

log = logging.getLogger(__name__)

NAME_SHOWN = 40  # characters of a field's name in a message: a table without a header has a text there
MAX_NAME_CHARACTERS = 4096  # of an id or a domain, which are kept for every piece of a text


def texts_of_rows(rows: Iterator[Row], fields: FieldMap, name: str) -> Iterator[Item]:
    """Yield the texts of the rows of a file; `name` is what the file is called where a row is rejected."""
    if fields.new_text_at:
        yield from joined_texts(rows, fields, name, fields.new_text_at)
        return
    for number, row in rows:
        yield number, _text_of_row(row, fields, name, number) if isinstance(row, dict) else row


def _text_of_row(row: dict[str, Any], fields: FieldMap, name: str, line: int) -> SourceText | Rejected:
    if problem := _text_problem(row, fields) or _name_problem(row, fields):
        return Rejected(problem[0], name, line, problem[1])
    text, identifier, domain = (nested(row, path) for path in (fields.text, fields.id, fields.domain))
    domain = "all" if domain in (None, "") else str(domain)
    made = _unnamed(text, domain) if identifier is None else SourceText(str(identifier), text, domain)
    return checked_text(made, fields, name, line)


def _text_problem(row: dict[str, Any], fields: FieldMap) -> tuple[Reason, str] | None:
    text = nested(row, fields.text)
    if text is None:
        return Reason.text_missing, f"field '{fields.text}' (data.fields) is missing; the fields: {names_in(row)}"
    if not isinstance(text, str):
        return Reason.text_not_a_string, f"field '{fields.text}' must be a string, found {type(text).__name__}"
    return None


def _name_problem(row: dict[str, Any], fields: FieldMap) -> tuple[Reason, str] | None:
    identifier, domain = nested(row, fields.id), nested(row, fields.domain)
    if identifier == "":
        return Reason.id_empty, f"field '{fields.id}' (data.fields) is empty"
    if not _is_name(identifier):
        return (
            Reason.id_not_a_string,
            f"field '{fields.id}' must be a string or an integer, found {type(identifier).__name__}",
        )
    if not _is_name(domain):
        return Reason.domain_not_a_string, f"field '{fields.domain}' must be a string, found {type(domain).__name__}"
    for field, value in ((fields.id, identifier), (fields.domain, domain)):
        if isinstance(value, str) and len(value) > MAX_NAME_CHARACTERS:
            return Reason.too_long, f"field '{field}' has {len(value)} characters, more than {MAX_NAME_CHARACTERS}"
    return None


def _is_name(value: Any) -> bool:
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _unnamed(text: str, domain: str) -> SourceText:
    """A text that nobody named is called by its words, so that its split depends on no order of files."""
    return SourceText(content_hash(text.encode(errors="replace").decode()).hex(), text, domain, named=False)


def checked_text(text: SourceText, fields: FieldMap, name: str, line: int) -> SourceText | Rejected:
    if not text.text.strip():
        return Rejected(Reason.text_empty, name, line, "the text is empty")
    if len(text.text) > fields.max_characters:
        return too_long(name, line, len(text.text))
    if "\0" in text.text:
        return Rejected(Reason.nul_character, name, line, "holds a NUL character: is it a text?")
    try:
        f"{text.id}{text.domain}{text.text}".encode()
    except UnicodeEncodeError:
        return Rejected(Reason.half_surrogate, name, line, "holds half a surrogate pair")
    return text


def too_long(name: str, line: int, num_characters: int) -> Rejected:
    return Rejected(Reason.too_long, name, line, f"{num_characters} characters, more than a text may have")


def joined_texts(rows: Iterator[Row], fields: FieldMap, name: str, new_text_at: str) -> Iterator[Item]:
    """Join rows that are lines of longer texts, as Wikitext's: a text begins where a line matches."""
    begins = re.compile(new_text_at)
    lines = _Lines(fields.max_characters)
    first = 0
    for number, row in rows:
        if not isinstance(row, dict):
            yield number, row
            continue
        yield number, None
        line = nested(row, fields.text)
        if not isinstance(line, str):
            yield number, _text_of_row(row, fields, name, number)
            continue
        if begins.search(line) and lines.hold_text:
            yield first, lines.text(fields, name, first)
            lines = _Lines(fields.max_characters)
        first = number if lines.length == 0 else first
        lines.add(line if line.endswith("\n") else f"{line}\n")
    if lines.hold_text:
        yield first, lines.text(fields, name, first)


class _Lines:
    """The lines of a text so far. Of one that is longer than a text may be only the length is kept."""

    def __init__(self, max_characters: int) -> None:
        self.hold_text, self.length = False, 0
        self._max, self._lines = max_characters, list[str]()

    def add(self, line: str) -> None:
        self.hold_text = self.hold_text or bool(line.strip())
        self.length += len(line)
        if self.length > self._max:
            self._lines.clear()
        else:
            self._lines.append(line)

    def text(self, fields: FieldMap, name: str, first: int) -> SourceText | Rejected:
        if self.length > self._max:
            return too_long(name, first, self.length)
        return checked_text(_unnamed("".join(self._lines), "all"), fields, name, first)


def say_unread(source: Path | str, names: Collection[str], read: Sequence[str], more: str = "") -> None:
    """Warn once of the fields of a file or a source that are not read, and say what is read instead."""
    if unread := [name for name in names if name not in read]:
        found = names_in(name for name in read if name in names)
        log.warning(
            f"{source}: fields that are not read: {names_in(unread)}; read are {found}, and a row may have "
            f"{', '.join(read)}{more}"
        )


def names_in(row: Iterable[Any]) -> str:
    """Return the names of a row's fields for a message."""
    return ", ".join(str(name)[:NAME_SHOWN] for name in row) or "none"


def nested(row: dict[str, Any], path: str) -> Any:
    """Return the field of a row that a path with dots leads to, or None."""
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
