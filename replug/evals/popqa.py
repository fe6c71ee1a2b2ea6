"""PopQA (Mallen et al. 2023): its questions and prompts, and the popularity of subjects.

A set is one of

FILE.tsv            the published table: tab-separated, with a header
FILE.jsonl[.gz]     JSON Lines of the same fields
P19.test.json       a file of EntityQuestions (Sciavolino et al. 2021), named by its relation; its questions have
                    neither subject nor popularity, and the subject is read by the relation's template
FOLDER              all files of EntityQuestions in it

The fields are `subj`, `prop` (one of TEMPLATES), `obj`, `possible_answers` (or `answers`; in a table a JSON list), and
optional `question`, `s_pop`, `o_pop` (monthly page views), `id` and `gold`. A question that is there must be the one
that its template makes.

Prompts are those of the official code (`run_model.py`). A question is `Q: ... A:`, with its passage and a blank line
before it where there is one. Shots are such questions with their answers. GenRead's prompt asks the LM to write the
passage (Yu et al. 2023).

Popularity is a count: monthly page views of the subject in PopQA, documents that name it elsewhere.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.progress import Progress
from replug.data.rows import read_json_array, read_json_lines
from replug.evals.answers import answer_tokens
from replug.evals.questions import (
    BETWEEN_BLOCKS,
    OpenQuestion,
    answers_field,
    draw_demonstrations,
    hold_out_demonstrations,
    one_line,
    open_question,
    questions_of_rows,
    require_not_evaluated,
    text_of,
)

# Subjects stand where the braces are. The relations' names are those of the field `prop`.
POPQA_TEMPLATES = {
    "occupation": "What is {}'s occupation?",
    "place of birth": "In what city was {} born?",
    "genre": "What genre is {}?",
    "father": "Who is the father of {}?",
    "country": "In what country is {}?",
    "producer": "Who was the producer of {}?",
    "director": "Who was the director of {}?",
    "capital of": "What is {} the capital of?",
    "screenwriter": "Who was the screenwriter for {}?",
    "composer": "Who was the composer of {}?",
    "color": "What color is {}?",
    "religion": "What is the religion of {}?",
    "sport": "What sport does {} play?",
    "author": "Who is the author of {}?",
    "mother": "Who is the mother of {}?",
    "capital": "What is the capital of {}?",
}
# EntityQuestions (Sciavolino et al. 2021), whose files are named by Wikidata's properties.
ENTITY_QUESTIONS_TEMPLATES = {
    "P17": "Which country is {} located in?",
    "P19": "Where was {} born?",
    "P20": "Where did {} die?",
    "P26": "Who is {} married to?",
    "P36": "What is the capital of {}?",
    "P40": "Who is {}'s child?",
    "P50": "Who is the author of {}?",
    "P69": "Where was {} educated?",
    "P106": "What kind of work does {} do?",
    "P112": "Who founded {}?",
    "P127": "Who owns {}?",
    "P131": "Where is {} located?",
    "P136": "What type of music does {} play?",
    "P159": "Where is the headquarter of {}?",
    "P170": "Who was {} created by?",
    "P175": "Who performed {}?",
    "P176": "Which company is {} produced by?",
    "P264": "What music label is {} represented by?",
    "P276": "Where is {} located?",
    "P407": "Which language was {} written in?",
    "P413": "What position does {} play?",
    "P495": "Which country was {} created in?",
    "P740": "Where was {} founded?",
    "P800": "What is {} famous for?",
}
TEMPLATES = POPQA_TEMPLATES | ENTITY_QUESTIONS_TEMPLATES
GENREAD_TEMPLATE = "Generate a background document from Wikipedia to answer the given question. {}"


@dataclass(frozen=True, slots=True)
class PopShot:
    """A question that is shown with its answer, and with its own passage where the method has passages."""

    question: str
    answer: str
    passage: str | None = None


def question_of(relation: str, subject: str) -> str:
    """The question that asks a subject's relation, a key of TEMPLATES."""
    before, after = TEMPLATES[relation].split("{}")
    return f"{before}{subject}{after}"


def subject_of(relation: str, question: str) -> str | None:
    """The subject of a question that was made by the relation's template; None where it was not."""
    before, after = TEMPLATES[relation].split("{}")
    subject = question[len(before) : len(question) - len(after)]
    return subject if subject.strip() and question == f"{before}{subject}{after}" else None


def popqa_prompt(question: str, passage: str | None, shots: Sequence[PopShot] = ()) -> str:
    """Return what the LM continues: the shots, the passage, the question."""
    return popqa_opening(shots) + _block(question, passage)


def popqa_opening(shots: Sequence[PopShot]) -> str:
    """Return what the prompts of all questions of a relation begin with."""
    return "".join(f"{_block(shot.question, shot.passage)} {one_line(shot.answer)}{BETWEEN_BLOCKS}" for shot in shots)


def genread_prompt(question: str) -> str:
    """Return what the LM continues by a document of its own."""
    return GENREAD_TEMPLATE.format(one_line(question))


def first_line(generated: str) -> str:
    """The first line of what the LM wrote, after a blank line that it may begin with, as the official code cuts it."""
    return generated.removeprefix(BETWEEN_BLOCKS).partition("\n")[0].strip()


def _block(question: str, passage: str | None) -> str:
    return f"{'' if passage is None else passage.strip() + BETWEEN_BLOCKS}Q: {one_line(question)} A:"


PAGE_VIEWS, DOCUMENTS = "s_pop", "corpus"  # what popularity counts, as outcomes say it in `popularity_from`


def popularity_bin(popularity: float) -> str:
    """The power of ten it lies in, as `popularity 10^2-10^3`, whose lower end belongs to it; 0 has a bin of its own."""
    if popularity < 1:
        return "popularity 0"
    power = len(str(int(popularity))) - 1  # a logarithm may round 1,000 down
    return f"popularity 10^{power}-10^{power + 1}"


def popularity_correlation(popularity: np.ndarray, right: np.ndarray) -> float | None:
    """Pearson's correlation of being right with log10 of popularity, both [N]; a popularity below 1 counts as 1.

    None where one of the two is the same for all questions, so that there is no correlation.
    """
    logs = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0))
    right = np.asarray(right, dtype=np.float64)
    if len(logs) < 2 or np.ptp(logs) == 0 or np.ptp(right) == 0:
        return None
    deviations = logs - logs.mean(), right - right.mean()
    return float(
        (deviations[0] @ deviations[1]) / math.sqrt((deviations[0] @ deviations[0]) * (deviations[1] @ deviations[1]))
    )


def relative_popularity(popularity: np.ndarray, relations: Sequence[str]) -> np.ndarray:
    """Log10 popularity [N] less its relation's mean, in the relation's standard deviations (figure 7).

    A popularity below 1 counts as 1. 0 for a relation whose questions are all equally popular.
    """
    logs, names = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0)), np.asarray(relations)
    relative = np.zeros(len(logs))
    for relation in set(relations):
        own = names == relation
        if np.ptp(logs[own]) > 0:
            relative[own] = (logs[own] - logs[own].mean()) / logs[own].std()
    return relative


def most_frequent(answers: Sequence[str]) -> str:
    """The first of those that occur most often."""
    return Counter(answers).most_common(1)[0][0]


def document_frequencies(entities: Iterable[str], texts: Iterable[str], num_texts: int) -> dict[str, int]:
    """By entity, the number of texts that hold its words, whatever their case; one pass over the texts for all.

    An entity without a word is held by none.
    """
    words_of = {entity: tuple(answer_tokens(entity)) for entity in dict.fromkeys(entities)}
    lengths: dict[str, set[int]] = {}  # of the entities that begin with a word, in words
    for words in filter(None, words_of.values()):
        lengths.setdefault(words[0], set()).add(len(words))
    counts = dict.fromkeys(words_of.values(), 0)
    progress = Progress(f"documents that name {len(words_of)} subjects", num_texts)
    for text in texts:
        tokens = answer_tokens(text)
        spans = {
            tuple(tokens[place : place + length])
            for place, token in enumerate(tokens)
            for length in lengths.get(token, ())
        }
        for words in spans & counts.keys():
            counts[words] += 1
        progress.advance()
    return {entity: counts[words] for entity, words in words_of.items()}


QuestionRow = Mapping[str, Any]
ENTITY_QUESTIONS_FILE = re.compile(r"(?P<relation>P[0-9]+)\..*json")


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
    questions = questions_of_rows(_rows_of_set(path), _question, path)
    without = [question.example.id for question in questions if question.subject_popularity is None]
    if without and len(without) < len(questions):  # page views of some and documents of others are not one scale
        raise UserError(
            f"{path}: s_pop is missing in {len(without)} of {len(questions)} questions, first {without[0]}; expected "
            "it in all, or in none (then documents of the corpus are counted)"
        )
    return questions


def _rows_of_set(path: Path) -> Iterator[tuple[str, QuestionRow]]:
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


def _entity_rows(path: Path) -> Iterator[tuple[str, QuestionRow]]:
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


def _table_rows(path: Path) -> Iterator[tuple[str, QuestionRow]]:
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
                cells: dict[str, Any] = {name: cell for name, cell in row.items() if cell.strip()}
                for name in ("s_pop", "o_pop"):
                    with suppress(KeyError, ValueError):  # what is not a number is refused with its field's name
                        cells[name] = float(cells[name])
                yield where, cells
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); convert the file") from error
    except csv.Error as error:
        raise UserError(f"{path}: not a table of tab-separated cells ({error})") from error


def _question(row: QuestionRow, where: str) -> PopQuestion:
    relation, subject = text_of(row, "prop", where), text_of(row, "subj", where)
    if relation not in TEMPLATES:
        raise UserError(f"{where}: prop {relation!r} is no relation known here; expected one of {', '.join(TEMPLATES)}")
    expected = question_of(relation, subject)
    asked = row.get("question") or expected
    if one_line(str(asked)) != one_line(expected):
        raise UserError(f"{where}: question {asked!r} is not what prop {relation!r} and subj make: {expected!r}")
    field = answers_field(row, ("possible_answers", "answers"), where)
    answers = row[field]
    if isinstance(answers, str):  # a list that is written as JSON, as PopQA's tables have it
        with suppress(ValueError):  # what is none is refused below
            answers = json.loads(answers)
    found = open_question({**row, "question": asked, "domain": relation, field: answers}, where, field)
    return PopQuestion(
        found.example,
        found.answers,
        subject,
        text_of(row, "obj", where),
        _popularity(row, "s_pop", where),
        _popularity(row, "o_pop", where),
    )


def _popularity(row: QuestionRow, field: str, where: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"{where}: field {field!r} must be a count, 0 or more, found {value!r}")
    return float(value)


NUM_SHOTS = 15


def plan_shots(
    pool: Sequence[PopQuestion], evaluated: Sequence[PopQuestion] | None, num_shots: int, seed: int
) -> tuple[tuple[PopQuestion, ...], dict[str, tuple[PopQuestion, ...]]]:
    """Return the questions that are asked, in order, and those that are shown before the questions of each relation.

    A relation's shots are `num_shots` // (number of other relations) of each other relation, shuffled.

    The official code draws anew for every question; here each relation's are drawn once, so that the questions of a
    relation share an opening. They come from the pool and are never evaluated. With `evaluated` None, those of the
    pool that are no shots are evaluated. Raises UserError where that leaves too few questions, or there is no other
    relation.
    """
    asked = list(pool if evaluated is None else evaluated)
    if num_shots == 0:
        return _by_relation(asked), {question.relation: () for question in asked}
    of_pool = _grouped(pool)
    numbers = {relation: _num_each(relation, of_pool, num_shots) for relation in _grouped(asked)}
    drawn, asked = _draw(of_pool, evaluated, max(numbers.values()), seed)
    shots = {}
    for relation, number in numbers.items():
        some = [shot for other in drawn if other != relation for shot in drawn[other][:number]]
        order = np.random.default_rng([seed, 4]).permutation(len(some))
        shots[relation] = tuple(some[place] for place in order)
    require_not_evaluated([shot for of in shots.values() for shot in of], asked)
    return _by_relation(asked), shots


def _num_each(relation: str, of_pool: Mapping[str, Sequence[PopQuestion]], num_shots: int) -> int:
    others = len(of_pool.keys() - {relation})
    if not others:
        raise UserError(
            f"shots come from other relations, but all questions are of {relation!r}; expected questions.shots=0, or "
            "questions.demonstrations=FILE with questions of other relations"
        )
    if num_shots < others:
        raise UserError(
            f"questions.shots is {num_shots}, but each of {others} other relations gives as many shots; expected "
            f"{others} or more, or 0"
        )
    return num_shots // others


def _draw(
    of_pool: Mapping[str, Sequence[PopQuestion]], evaluated: Sequence[PopQuestion] | None, number: int, seed: int
) -> tuple[dict[str, list[PopQuestion]], list[PopQuestion]]:
    """So many questions of each relation of the pool, and what is left to evaluate."""
    needed = number + (evaluated is None)
    for relation, questions in of_pool.items():
        if len(questions) < needed:
            raise UserError(
                f"{len(questions)} questions of relation {relation!r}, but {number} are shown as shots"
                f"{' and one at least is to be left to evaluate' if evaluated is None else ''}; ask for fewer "
                "(questions.shots), or give another file of shots (questions.demonstrations)"
            )
    if evaluated is not None:
        given = {relation: draw_demonstrations(some, evaluated, number, seed) for relation, some in of_pool.items()}
        return given, list(evaluated)
    held = {relation: hold_out_demonstrations(some, number, seed) for relation, some in of_pool.items()}
    return {relation: shots for relation, (shots, _) in held.items()}, [q for _, rest in held.values() for q in rest]


def _grouped(questions: Sequence[PopQuestion]) -> dict[str, list[PopQuestion]]:
    grouped: dict[str, list[PopQuestion]] = {}
    for question in questions:
        grouped.setdefault(question.relation, []).append(question)
    return dict(sorted(grouped.items()))


def _by_relation(questions: Sequence[PopQuestion]) -> tuple[PopQuestion, ...]:
    """In the order of relations' names, and of the file within one."""
    return tuple(question for some in _grouped(questions).values() for question in some)
