"""The records that reading a source passes on, and its rejected rows and files, by reason.

Every rejected case is counted, and the first hundred of each reason are listed.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

EXAMPLES = 100  # listed for each reason
NAME_SHOWN = 40  # characters of a field's name in a message: a table without a header has a text there


class Reason(StrEnum):
    not_utf8 = "not_utf8"
    invalid_json = "invalid_json"
    not_an_object = "not_an_object"
    invalid_tsv = "invalid_tsv"
    wrong_columns = "wrong_columns"
    damaged_file = "damaged_file"
    no_main_text = "no_main_text"
    unreadable_file = "unreadable_file"
    text_missing = "text_missing"
    text_not_a_string = "text_not_a_string"
    text_empty = "text_empty"
    empty_file = "empty_file"
    half_surrogate = "half_surrogate"
    nul_character = "nul_character"
    too_long = "too_long"
    id_not_a_string = "id_not_a_string"
    id_empty = "id_empty"
    domain_not_a_string = "domain_not_a_string"
    duplicate_id = "duplicate_id"


def readable_name(name: str) -> str:
    """Return a file's name as text: bytes of other encodings are spelt out, such as `\\xe9`."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Rejected:
    """One row or file that was not taken. `line` counts from 1; 0 stands for the whole file."""

    reason: Reason
    file: str
    line: int
    detail: str

    def __str__(self) -> str:
        return f"{readable_name(self.file)}{f':{self.line}' if self.line else ''}: {self.detail} ({self.reason.value})"


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A part of the source that one worker reads alone.

    `start` and `stop` count bytes, row groups or shards, by its format.
    """

    kind: str  # the format's name
    names: tuple[str, ...]  # files, or what the source is called
    start: int = 0
    stop: int | None = None
    root: str = ""  # of a tree of texts: their ids are paths below it
    number: int = 0  # among all of the source


@dataclass(frozen=True, slots=True)
class SourceText:
    """One whole text before it is cut. `named` is False if its id is a hash of its words, for want of another.

    Prose is cut at headings and sentences, other texts by tokens alone.
    """

    id: str
    text: str
    domain: str
    named: bool = True
    is_prose: bool = False


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Names of the fields of a raw row; dots reach into nested fields (`meta.pile_set_name`).

    `new_text_at` is for rows or lines that are parts of texts: an expression that a text's first line matches.
    """

    text: str = "text"
    id: str = "id"
    domain: str = "domain"
    new_text_at: str | None = None
    max_characters: int = 16 << 20

    @classmethod
    def of(cls, fields: Mapping[str, str], new_text_at: str | None = None) -> "FieldMap":
        """Return the map that `data.fields` describes: from the row's name of a field to the one that is read."""
        text, id, domain = ({new: old for old, new in fields.items()}.get(new, new) for new in ("text", "id", "domain"))
        return cls(text, id, domain, new_text_at)


# A line or row of a source shard, counted from 1; None for a line that is not a row: blank, or a table's header.
Row = tuple[int, dict[str, Any] | Rejected | None]
Item = tuple[int, SourceText | Rejected | None]  # the text of a row; 0 stands for the whole file


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


def nested(row: Mapping[str, Any], path: str) -> Any:
    """Return the field of a row by its name, or by a path A.B into a field that holds others; else None."""
    if path in row or "." not in path:
        return row.get(path)
    outer, _, inner = path.partition(".")
    within = row.get(outer)
    return nested(within, inner) if isinstance(within, dict) else None
