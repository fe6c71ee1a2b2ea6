"""The records that reading a source passes on, and its rejected rows and files, by reason.

Every rejected case is counted, and the first hundred of each reason are listed.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.files import replace_file

log = logging.getLogger(__name__)

EXAMPLES = 100  # listed for each reason
ENOUGH_ROWS = 10_000  # rows after which the share is judged while the source is still being read
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


NOTHING_TO_READ = (Reason.no_main_text, Reason.empty_file)  # pages of links, `__init__.py`: no damage


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


def write_rejected(path: Path, examples: Iterable[Rejected]) -> None:
    """Write `rejected.jsonl`: the first hundred of each reason, in the order of the files."""
    listed: Counter[str] = Counter()
    lines = []
    for case in examples:
        listed[case.reason.value] += 1
        if listed[case.reason.value] <= EXAMPLES:
            row = {
                "reason": case.reason.value,
                "file": readable_name(case.file),
                "line": case.line or None,
                "detail": case.detail,
            }
            lines.append(json.dumps(row, ensure_ascii=True))
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def too_many(counts: Counter[str], num_rows: int, limit: float) -> bool:
    """Return whether more than a share `limit` of all rows was rejected, beside files that hold nothing to read."""
    rejected = counts.total() - sum(counts[reason] for reason in NOTHING_TO_READ)
    return rejected > limit * (num_rows + rejected)


def require_few_rejected(
    counts: Counter[str], examples: Iterable[Rejected], num_rows: int, limit: float, listed_in: Path
) -> None:
    """Raise UserError with the first cases where more than a share `limit` of the rows was rejected."""
    rejected = counts.total()
    if not too_many(counts, num_rows, limit):
        return
    first: dict[str, Rejected] = {}
    for case in examples:
        first.setdefault(case.reason.value, case)
    raise UserError(
        f"{rejected} of {num_rows + rejected} rows of data.source were rejected, more than "
        f"data.max_rejected_share={limit:g} allows: {'; '.join(str(case) for case in list(first.values())[:3])}. "
        f"Counts: {dict(counts)}; the first of each are listed in {listed_in}"
    )


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
