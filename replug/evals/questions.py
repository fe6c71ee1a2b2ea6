"""Questions, as all evaluations of questions read, draw and search for them and put them into prompts.

A set has rows with `question` and `answers`, and optional `id`, `domain` and `gold` (ids of documents).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.rules import QUESTION
from replug.data.answers import normalize_answer
from replug.data.rows import ids_of, one_line, question_rows, require_new, texts_of
from replug.data.sources.records import say_unread
from replug.evals.loop import Item

BETWEEN_BLOCKS = "\n\n"
STOP = "\n"
PUBLISHED_SETS = json.loads(Path(__file__).with_name("published_sets.json").read_text(encoding="utf-8"))
QUESTION_FIELDS = ("id", "question", "answers", "domain", "source", "gold", "candidates")


def knowledge_line(document: str | None) -> str:
    """Return `Knowledge: ...` with its newline; nothing where there is no document."""
    return "" if document is None else f"Knowledge: {one_line(document)}\n"


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question, `example.query`, and every answer that is accepted; the first one is shown in demonstrations."""

    example: Item
    answers: tuple[str, ...]


Question = TypeVar("Question", bound=OpenQuestion)


def read_questions(
    source: str | Path, fields: Mapping[str, str] | None = None, needs_answers: bool = True
) -> list[OpenQuestion]:
    """Read rows of any format; a question without `id` is named by the file and its line.

    Raises UserError with file and line for a field that is missing or of another form.
    """
    names: dict[str, None] = {}

    def read(row: Mapping[str, Any], where: str) -> OpenQuestion:
        names.update(dict.fromkeys(row))
        return open_question(row, where, needs_answers=needs_answers or row.get("answers") is not None)

    questions = questions_of_rows(question_rows(source, fields), read, source)
    say_unread(source, names, QUESTION_FIELDS)
    return questions


def questions_of_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], read: Callable[[Mapping[str, Any], str], Question], path: str | Path
) -> list[Question]:
    """Read the question of each row. Raises UserError for an id twice, and for no questions."""
    questions: list[Question] = []
    seen: set[str] = set()
    for where, row in rows:
        questions.append(read(row, where))
        require_new(questions[-1].example.id, seen, where)
    if not questions:
        raise UserError(f"{path} holds no questions")
    return questions


def text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that must be a text. Raises UserError with where it stands."""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        named = ", ".join(row) or "none"
        raise UserError(f"{where}: field {field!r} must be a text, found {value!r}; the fields here are {named}")
    return value


def name_of(row: Mapping[str, Any], fields: Sequence[str], where: str) -> str | None:
    """Return the first of the fields that a row has, a string or an integer; None where it has none of them."""
    field = next((field for field in fields if row.get(field) is not None), None)
    if field is None:
        return None
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{where}: field {field!r} must be a string or an integer, found {value!r}")
    return str(value)


def answers_field(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """Return which of the names the row has its answers under. Raises UserError where it is not one."""
    given = [name for name in names if row.get(name) is not None]
    if len(given) != 1:
        expected = " or ".join(map(repr, names))
        raise UserError(f"{where}: expected the field {expected}, found {' and '.join(given) or 'neither'}")
    return given[0]


def open_question(
    row: Mapping[str, Any], where: str, answers: str = "answers", needs_answers: bool = True
) -> OpenQuestion:
    """Read the question of a row. Raises UserError for a field that is missing or of another form."""
    example = Item(
        id=name_of(row, ("id",), where) or Path(where).name,
        query=text_of(row, "question", where),
        group=name_of(row, ("domain",), where) or "all",
        gold=ids_of(row, "gold", where),
        source=name_of(row, ("source",), where),
    )
    return OpenQuestion(example, texts_of(row, answers, where) if needs_answers else ())


def draw_demonstrations(
    pool: Sequence[Question], evaluated: Sequence[OpenQuestion], num: int, seed: int
) -> list[Question]:
    """Draw questions of the pool that are not evaluated, evenly, the same for the same seed.

    A question is evaluated where its id or its normalised text is. No two have the same text. Raises UserError where
    the pool has too few.
    """
    by_text: dict[str, Question] = {}
    for question in not_among(pool, evaluated):
        by_text.setdefault(normalize_answer(question.example.query), question)
    candidates = list(by_text.values())
    if len(candidates) < num:
        raise UserError(
            f"{num} demonstrations are asked for, but {len(candidates)} of {len(pool)} questions are not evaluated: "
            "give a separate file of demonstrations, or evaluate fewer questions"
        )
    order = np.random.default_rng([seed, 2]).permutation(len(candidates))[:num]
    return [candidates[place] for place in order]


def hold_out_demonstrations(
    questions: Sequence[Question], num: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """Draw demonstrations from the evaluated file; return them and the questions that are left, in order.

    Raises UserError where nothing would be left.
    """
    demonstrations = draw_demonstrations(questions, (), num, seed)
    evaluated = not_among(questions, demonstrations)
    if not evaluated:
        raise UserError(f"{num} demonstrations leave none of {len(questions)} questions to evaluate; ask for fewer")
    return demonstrations, evaluated


def not_among(questions: Sequence[Question], others: Iterable[OpenQuestion]) -> list[Question]:
    """Return the questions that are none of the others, by id and by normalised text."""
    names = [(other.example.id, normalize_answer(other.example.query)) for other in others]
    ids, texts = {identifier for identifier, _ in names}, {text for _, text in names}
    return [
        question
        for question in questions
        if question.example.id not in ids and normalize_answer(question.example.query) not in texts
    ]


def queries_of(config: EvaluationConfig, examples: Iterable[Item]) -> list[str]:
    """Return the questions in the form of `questions.query`."""
    return [config.questions.query.replace(QUESTION, example.query) for example in examples]


def draw_questions(questions: list[Question], num: int | None, seed: int) -> list[Question]:
    """Draw so many questions by the seed, in the file's order; all where there are no more."""
    if num is None or num >= len(questions):
        return questions
    rows = np.random.default_rng([seed, 3]).choice(len(questions), size=num, replace=False)
    return [questions[row] for row in sorted(rows)]
