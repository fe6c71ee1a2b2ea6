"""PopQA (Mallen et al. 2023): questions about one relation of one subject, whose popularity is known.

A set is one of

FILE.tsv            the published table: tab-separated, with a header
FILE.jsonl[.gz]     JSON Lines of the same fields
P19.test.json       a file of EntityQuestions (Sciavolino et al. 2021), named by its relation; its questions have
                    neither subject nor popularity, and the subject is read by the relation's template
FOLDER              all files of EntityQuestions in it

The fields are `subj`, `prop` (one of `prompts.TEMPLATES`), `obj`, `possible_answers` (or `answers`; in a table a
JSON list), and optional `question`, `s_pop`, `o_pop` (monthly page views), `id` and `gold`. A question that is there
must be the one that its template makes.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.rows import read_json_array, read_json_lines
from replug.evals.open_qa import OpenQuestion, open_question, questions_of_rows
from replug.evals.popqa.prompts import ENTITY_QUESTIONS_TEMPLATES, TEMPLATES, question_of, subject_of
from replug.evals.prompts import one_line

ENTITY_QUESTIONS_FILE = re.compile(r"(?P<relation>P[0-9]+)\..*json")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PopQuestion(OpenQuestion):
    """A question of the relation `example.group`; `object` is the answer that shots show.

    Popularity is what the file says, in monthly page views; None where it says nothing.
    """

    subject: str
    object: str
    subject_popularity: float | None = None
    object_popularity: float | None = None

    @property
    def relation(self) -> str:
        return self.example.group


def read_popqa(path: Path) -> list[PopQuestion]:
    """Every question of a file or folder, in its order.

    Raises UserError with file and line for a field that is missing or of another form, an unknown relation, a question
    that its template does not make, and for popularity that only some of the questions have.
    """
    questions = questions_of_rows(_rows(path), _question, path)
    _require_popularity_of_all_or_none(questions, path)
    return questions


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".json" and _entity_relation(file))
        if not files:
            raise UserError(f"{path} holds no files of EntityQuestions; expected some such as P19.test.json")
        for file in files:
            yield from _entity_rows(file)
    elif _entity_relation(path):
        yield from _entity_rows(path)
    elif path.suffix == ".tsv":
        yield from _table_rows(path)
    else:
        yield from read_json_lines(path)


def _entity_relation(path: Path) -> str | None:
    found = ENTITY_QUESTIONS_FILE.fullmatch(path.name)
    return found["relation"] if found else None


def _entity_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of `question` and `answers` with PopQA's fields; the first answer is the object."""
    relation = str(_entity_relation(path))
    if relation not in ENTITY_QUESTIONS_TEMPLATES:
        raise UserError(f"{path}: {relation} is no relation of EntityQuestions; expected one of {_ENTITY_RELATIONS}")
    rows = read_json_lines(path) if path.suffix == ".jsonl" else read_json_array(path)
    for number, (where, row) in enumerate(rows, start=1):
        question = row.get("question")
        subject = subject_of(relation, question) if isinstance(question, str) else None
        if subject is None:
            raise UserError(f"{where}: question {question!r} is not of the form {TEMPLATES[relation]!r}")
        answers = row.get("answers")
        first = answers[0] if isinstance(answers, list) and answers else None
        yield where, {"id": f"{path.name}:{number}", **row, "subj": subject, "prop": relation, "obj": first}


_ENTITY_RELATIONS = ", ".join(ENTITY_QUESTIONS_TEMPLATES)


def _table_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Empty cells are left out; numbers and the list of answers are read, for in a table all is text."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected PopQA as a table")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t", strict=True)
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise UserError(f"{where}: expected {len(reader.fieldnames or ())} cells, as the header has")
                cells = {name: cell for name, cell in row.items() if cell.strip()}
                yield where, {**cells, **{name: _number(cells[name]) for name in ("s_pop", "o_pop") if name in cells}}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); convert the file") from error
    except csv.Error as error:
        raise UserError(f"{path}: not a table of tab-separated cells ({error})") from error


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell  # refused with its field's name


def _question(row: Row, where: str) -> PopQuestion:
    relation, subject = _text(row, "prop", where), _text(row, "subj", where)
    if relation not in TEMPLATES:
        raise UserError(f"{where}: prop {relation!r} is no relation known here; expected one of {', '.join(TEMPLATES)}")
    expected = question_of(relation, subject)
    asked = row.get("question") or expected
    if one_line(str(asked)) != one_line(expected):
        raise UserError(f"{where}: question {asked!r} is not what prop {relation!r} and subj make: {expected!r}")
    field = _answers_field(row, where)
    found = open_question({**row, "question": asked, "domain": relation, field: _listed(row[field])}, where, field)
    return PopQuestion(
        found.example,
        found.answers,
        subject,
        _text(row, "obj", where),
        _popularity(row, "s_pop", where),
        _popularity(row, "o_pop", where),
    )


def _answers_field(row: Row, where: str) -> str:
    given = [name for name in ("possible_answers", "answers") if row.get(name) is not None]
    if len(given) != 1:
        raise UserError(
            f"{where}: expected the field 'possible_answers' or 'answers', found {' and '.join(given) or 'neither'}"
        )
    return given[0]


def _listed(value: object) -> object:
    """A list that is written as JSON, as PopQA's tables have it, as a list; what is none is left, to be refused."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text(row: Row, field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where}: field {field!r} must be a text, found {value!r}; the fields here are {', '.join(row)}"
        )
    return value


def _popularity(row: Row, field: str, where: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"{where}: field {field!r} must be a count, 0 or more, found {value!r}")
    return float(value)


def _require_popularity_of_all_or_none(questions: Sequence[PopQuestion], path: Path) -> None:
    """Page views of some and documents of others are no one scale."""
    without = [question.example.id for question in questions if question.subject_popularity is None]
    if without and len(without) < len(questions):
        raise UserError(
            f"{path}: s_pop is missing in {len(without)} of {len(questions)} questions, first {without[0]}; expected "
            "it in all, or in none (then documents of the corpus are counted)"
        )
