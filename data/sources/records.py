"""The records that reading a source passes on."""

from dataclasses import dataclass
from typing import Any

from replug.data.sources.rejected import Rejected


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A part of the source that one worker reads alone. What `start` and `stop` count is its format's own matter."""

    number: int
    kind: str  # the format's name
    names: tuple[str, ...]  # files, or what the source is called
    size: int  # bytes, for showing progress; 0 where nobody knows
    start: int = 0
    stop: int | None = None
    root: str = ""  # of a tree of texts, whose ids are paths below it


@dataclass(frozen=True, slots=True)
class SourceText:
    """One whole text before it is cut. `named` is False where its id is a hash of its words, for want of another."""

    id: str
    text: str
    domain: str
    named: bool = True


@dataclass(frozen=True, slots=True)
class Passed:
    """A line that is no row: blank, or a table's header."""

    line: int


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Which fields of a raw row hold what; dots reach into nested fields (`meta.pile_set_name`).

    `new_text_at` is for rows or lines that are parts of texts: an expression that a text's first line matches.
    """

    text: str = "text"
    id: str = "id"
    domain: str = "domain"
    new_text_at: str | None = None
    max_characters: int = 16 << 20


Row = tuple[int, dict[str, Any]] | Rejected | Passed  # a line or row counted from the source shard's first, from 1
Item = tuple[int, SourceText | Rejected | Passed]  # the same of texts; 0 stands for the whole file
