"""Read the questions of PopQA (Mallen et al. 2023), draw their shots, and count how popular their subjects are.

A set is one of

FILE.tsv            the published table: tab-separated, with a header
FILE.jsonl[.gz]     JSON Lines of the same fields
akariasai/PopQA     the same on the hub

The fields are `subj`, `prop` (one of TEMPLATES), `obj`, `possible_answers` (or `answers`; in a table a JSON list), and
optional `question`, `s_pop` (monthly page views), `id` and `gold`. A `question` must be its template's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.answers import answer_tokens
from replug.data.progress import Progress
from replug.data.row_files import list_in, read_rows
from replug.data.rows import one_line
from replug.evals.questions import (
    OpenQuestion,
    answers_field,
    draw_demonstrations,
    hold_out_demonstrations,
    open_question,
    questions_of_rows,
    text_of,
)

# Subjects stand where the braces are. The relations' names are those of the field `prop`.
TEMPLATES = {
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


def question_of(relation: str, subject: str) -> str:
    """Return the question that asks for a subject's relation, a key of TEMPLATES."""
    before, after = TEMPLATES[relation].split("{}")
    return f"{before}{subject}{after}"


@dataclass(frozen=True, slots=True)
class PopQuestion(OpenQuestion):
    """A question of the relation `example.group`; `object` is the answer that shots show.

    `subject_popularity` is the monthly page views of the subject; None means that the file gives none.
    """

    subject: str
    object: str
    subject_popularity: float | None = None

    @property
    def relation(self) -> str:
        return self.example.group


def read_popqa(source: str | Path) -> list[PopQuestion]:
    """Return every question of a file or of the hub's set, in its order.

    Raises UserError with file and line for a missing or malformed field, an unknown relation, a question that its
    template does not make, and for popularity that only some of the questions have.
    """
    questions = questions_of_rows(read_rows(source), _question, source)
    without = [question.example.id for question in questions if question.subject_popularity is None]
    if without and len(without) < len(questions):  # page views of some and documents of others are not one scale
        raise UserError(
            f"{source}: s_pop is missing in {len(without)} of {len(questions)} questions, first {without[0]}; expected "
            "it in all, or in none (then documents of the corpus are counted)"
        )
    return questions


def _question(row: Mapping[str, Any], where: str) -> PopQuestion:
    relation, subject = text_of(row, "prop", where), text_of(row, "subj", where)
    if relation not in TEMPLATES:
        raise UserError(f"{where}: prop {relation!r} is unknown; expected one of {', '.join(TEMPLATES)}")
    expected = question_of(relation, subject)
    asked = row.get("question") or expected
    if one_line(str(asked)) != one_line(expected):
        raise UserError(f"{where}: question {asked!r} is not what prop {relation!r} and subj make: {expected!r}")
    field = answers_field(row, ("possible_answers", "answers"), where)
    answers = row[field]
    if isinstance(answers, str):  # of PopQA's tables; a text that is not a list is refused below
        answers = list_in(answers)
    found = open_question({**row, "question": asked, "domain": relation, field: answers}, where, field)
    views = row.get("s_pop")
    if isinstance(views, str):  # of a table; a word is refused with its field's name
        with suppress(ValueError):
            views = float(views)
    if views is not None and (
        isinstance(views, bool) or not isinstance(views, int | float) or not 0 <= views < math.inf
    ):
        raise UserError(f"{where}: field 's_pop' must be a count, 0 or more, found {views!r}")
    popularity = None if views is None else float(views)
    return PopQuestion(found.example, found.answers, subject, text_of(row, "obj", where), popularity)


NUM_SHOTS = 15


def plan_shots(
    pool: Sequence[PopQuestion], evaluated: Sequence[PopQuestion] | None, num_shots: int, seed: int
) -> tuple[list[PopQuestion], dict[str, tuple[PopQuestion, ...]]]:
    """Return the questions that are asked, by relation, and the shots before the questions of each relation.

    A relation's shots are `num_shots` // (number of other relations) of each other relation, shuffled. The official
    code draws them anew for every question; here they are drawn once for a relation, so that its questions share an
    opening. They come from the pool and are never evaluated; `evaluated` None means the rest of the pool. Raises
    UserError where too few questions are left, and where there is no other relation.
    """
    asked = list(pool if evaluated is None else evaluated)
    if num_shots == 0:
        return _ordered(asked), {question.relation: () for question in _ordered(asked)}
    pool_by_relation = _by_relation(pool)
    numbers = {relation: _num_each(relation, pool_by_relation, num_shots) for relation in _by_relation(asked)}
    drawn, asked = _draw(pool_by_relation, evaluated, max(numbers.values()), seed)
    shots = {}
    for relation, number in numbers.items():
        given = [shot for other in drawn if other != relation for shot in drawn[other][:number]]
        order = np.random.default_rng([seed, 4]).permutation(len(given))
        shots[relation] = tuple(given[place] for place in order)
    return _ordered(asked), shots


def _num_each(relation: str, pool: Mapping[str, Sequence[PopQuestion]], num_shots: int) -> int:
    """Return how many shots each other relation gives."""
    others = len(pool.keys() - {relation})
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
    pool: Mapping[str, Sequence[PopQuestion]], evaluated: Sequence[PopQuestion] | None, number: int, seed: int
) -> tuple[dict[str, list[PopQuestion]], list[PopQuestion]]:
    """Return `number` questions of each relation of the pool, and the questions left to evaluate."""
    drawn, rest = {}, list(evaluated or ())
    for relation, questions in pool.items():
        if len(questions) < number + (evaluated is None):
            raise UserError(
                f"{len(questions)} questions of relation {relation!r}, but {number} are shown as shots"
                f"{' and one at least is to be left to evaluate' if evaluated is None else ''}; ask for fewer "
                "(questions.shots), or give another file of shots (questions.demonstrations)"
            )
        if evaluated is not None:
            drawn[relation] = draw_demonstrations(questions, evaluated, number, seed)
        else:
            drawn[relation], left = hold_out_demonstrations(questions, number, seed)
            rest += left
    return drawn, rest


def _by_relation(questions: Sequence[PopQuestion]) -> dict[str, list[PopQuestion]]:
    grouped: dict[str, list[PopQuestion]] = {}
    for question in questions:
        grouped.setdefault(question.relation, []).append(question)
    return dict(sorted(grouped.items()))


def _ordered(questions: Sequence[PopQuestion]) -> list[PopQuestion]:
    """Return the questions in the order of relations' names, and of the file within one."""
    return sorted(questions, key=lambda question: question.relation)


# Popularity -------------------------------------------------------------------------------------------------------

PAGE_VIEWS, DOCUMENTS = "s_pop", "corpus"  # what popularity counts; outcomes name it in `popularity_from`


def popularity_bin(popularity: float) -> str:
    """Return the power of ten, such as `popularity 10^2-10^3`, whose lower end belongs to it; 0 has its own bin."""
    if popularity < 1:
        return "popularity 0"
    power = len(str(int(popularity))) - 1  # a logarithm may round 1,000 down
    return f"popularity 10^{power}-10^{power + 1}"


def popularity_correlation(popularity: np.ndarray, right: np.ndarray) -> float | None:
    """Return Pearson's correlation of being right with log10 of popularity, both [N]; below 1 counts as 1.

    None means that one of the two is the same for all questions.
    """
    logs = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0))
    right = np.asarray(right, dtype=np.float64)
    if len(logs) < 2 or np.ptp(logs) == 0 or np.ptp(right) == 0:
        return None
    deviations = logs - logs.mean(), right - right.mean()
    return float(
        (deviations[0] @ deviations[1]) / math.sqrt((deviations[0] @ deviations[0]) * (deviations[1] @ deviations[1]))
    )


def document_frequencies(entities: Iterable[str], texts: Iterable[str], num_texts: int) -> dict[str, int]:
    """Return by entity the number of texts that hold its words, whatever their case, in one pass over the texts.

    No text holds an entity without a word.
    """
    words_of = {entity: tuple(answer_tokens(entity)) for entity in dict.fromkeys(entities)}
    lengths: dict[str, set[int]] = {}  # first word -> numbers of words of the entities that begin with it
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
