"""A question of a set that is answered from searched passages, and what the readers of all sets share.

A row of any set may have `gold_evidence`, a text or a list of texts: what answers the question. It takes the place of
what the set itself gives, and is needed where the set gives none and `data.corpus` has no documents that it names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.rows import read_json_array, read_json_lines
from replug.evals.open_qa import OpenQuestion

Row = Mapping[str, Any]
GOLD_EVIDENCE = "gold_evidence"


@dataclass(frozen=True, slots=True)
class InternetQuestion(OpenQuestion):
    """A question with its accepted answers; the first one is shown in shots.

    `evidence` are texts that answer it; where there are none, `evidence_ids` name documents of the corpus that do.
    A question that neither has is one that nothing answers, or whose set tells no evidence. `labels` are all answers
    that there are, of a set of classification; none where answers are free. `year` is when it is asked, where its set
    says so.
    """

    evidence: tuple[str, ...] = ()
    evidence_ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    year: int | None = None

    @property
    def origin(self) -> str:
        """What variants of one question share: they are on one side of every split."""
        return self.example.source or self.example.id


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """How a public set is read. `metric` is what its answers are judged by.

    `read_shots` reads `questions.demonstrations`: the same set but where a set has no evidence of its own.
    """

    metric: str
    read: Callable[[Path], list[InternetQuestion]]
    read_shots: Callable[[Path], list[InternetQuestion]]


def rows_of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a JSON array (`.json`), or of JSON Lines, plain or gzip, each with where it stands."""
    return read_json_array(path) if path.suffix == ".json" else read_json_lines(path)


def text_of(row: Row, field: str, where: str) -> str:
    """A field that must be a text. Raises UserError with where it stands."""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field {field!r} must be a text, found {value!r}; the fields here are {_named(row)}")
    return value


def texts_of(row: Row, field: str, where: str) -> tuple[str, ...]:
    """A field that must be a list of texts, at least one. Raises UserError with where it stands."""
    value = row.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item.strip() for item in value):
        raise UserError(
            f"{where}: field {field!r} must be a list of texts, at least one, found {value!r}; the fields here are "
            f"{_named(row)}"
        )
    return tuple(value)


def identifier_of(row: Row, fields: Sequence[str], where: str) -> str:
    """The first of the fields that a row has; the file's name and the row's place where it has none."""
    for field in fields:
        value = row.get(field)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f"{where}: field {field!r} must be a string or an integer, found {value!r}")
            return str(value)
    return Path(where).name


def given_evidence(row: Row, where: str) -> tuple[str, ...]:
    """The texts of `gold_evidence`; none where the row has no such field."""
    if row.get(GOLD_EVIDENCE) is None:
        return ()
    if isinstance(row[GOLD_EVIDENCE], str):
        return (text_of(row, GOLD_EVIDENCE, where),)
    return texts_of(row, GOLD_EVIDENCE, where)


def _named(row: Row) -> str:
    return ", ".join(row) or "none"
