"""PopQA: short answers about subjects of known popularity, closed book or from documents (Mallen et al. 2023).

A set is one of

FILE.tsv            the published table: tab-separated, with a header
FILE.jsonl[.gz]     JSON Lines of the same fields
akariasai/PopQA     the same on the hub

The fields are `subj`, `prop` (one of TEMPLATES), `obj`, `possible_answers` (or `answers`; in a table a JSON list),
`s_pop` (monthly page views), and optional `question`, `id` and `gold`.

Prompts follow the official code (`run_model.py`): a question is `Q: ... A:`, after its passage, if any, and a blank
line; so do demonstrations, though the paper does not state that. Besides accuracy an outcome has the costs of the
answer, the popularity, by which a policy decides whether to retrieve (`evals.adaptive`), the LM's confidence and the
first document's similarity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from replug.answering.prompts import BETWEEN_BLOCKS, STOP
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.answers import contains_answer, has_answer
from replug.data.rows import list_in, one_line, read_rows
from replug.evals.evidence import Evidence
from replug.evals.loop import Metric, Outcome
from replug.evals.questions import (
    PUBLISHED_SETS,
    FewShotTask,
    OpenQuestion,
    answers_field,
    draw_demonstrations,
    draw_questions,
    first_line,
    hold_out_demonstrations,
    open_question,
    questions_of_rows,
    text_of,
)
from replug.models.generation import Generated

NUM_SHOTS = 15
# relation (the field `prop`) -> question with braces for the subject
TEMPLATES: dict[str, str] = PUBLISHED_SETS["popqa_templates"]


def question_of(relation: str, subject: str) -> str:
    """Return the question about a relation of a subject; `relation` is a key of TEMPLATES."""
    before, after = TEMPLATES[relation].split("{}")
    return f"{before}{subject}{after}"


@dataclass(frozen=True, slots=True)
class PopQuestion(OpenQuestion):
    """A question of the relation `example.group`; `object` is its answer in shots.

    `popularity` is the monthly page views of the subject.
    """

    subject: str
    object: str
    popularity: float

    @property
    def relation(self) -> str:
        return self.example.group


# Reading and shots ----------------------------------------------------------------------------------------------------


def read_popqa(source: str | Path) -> list[PopQuestion]:
    """Return every question of a file or of the set on the hub, in order.

    Raises UserError with file and line for a missing or malformed field, and for an unknown relation.
    """
    return questions_of_rows(read_rows(source), _question, source)


def _question(row: Mapping[str, Any], where: str) -> PopQuestion:
    relation, subject = text_of(row, "prop", where), text_of(row, "subj", where)
    if relation not in TEMPLATES:
        raise UserError(f"{where}: prop {relation!r} is unknown; expected one of {', '.join(TEMPLATES)}")
    question = row.get("question") or question_of(relation, subject)
    field = answers_field(row, ("possible_answers", "answers"), where)
    answers = row[field]
    if isinstance(answers, str):  # in PopQA's tables; open_question refuses a text that is not a list
        answers = list_in(answers)
    read = open_question({**row, "question": question, "domain": relation, field: answers}, where, field)
    views = str(row.get("s_pop"))  # a text in a table
    if not views.replace(".", "", 1).isdigit():
        raise UserError(f"{where}: field 's_pop' must be a count, 0 or more, found {views}")
    return PopQuestion(read.example, read.answers, subject, text_of(row, "obj", where), float(views))


def plan_shots(
    pool: Sequence[PopQuestion], evaluated: Sequence[PopQuestion] | None, num_shots: int, seed: int
) -> tuple[list[PopQuestion], dict[str, tuple[PopQuestion, ...]]]:
    """Return the questions to ask, by relation, and the shots before the questions of each relation.

    A relation's shots are `num_shots` // (number of other relations) of each other relation, shuffled. The official
    code draws new shots for every question; here the questions of a relation share their shots, and so an opening.
    Shots come from the pool and are never evaluated; `evaluated` None means the rest of the pool. Raises UserError if
    too few questions are left or there is no other relation.
    """
    relations = sorted({question.relation for question in (pool if evaluated is None else evaluated)})
    by_relation: dict[str, list[PopQuestion]] = {}
    for question in sorted(pool, key=lambda question: question.relation):
        by_relation.setdefault(question.relation, []).append(question)
    numbers = {}
    for relation in relations:
        others = len(by_relation.keys() - {relation})
        if num_shots and not 0 < others <= num_shots:
            raise UserError(
                f"questions.shots is {num_shots}, but shots of {relation!r} come equally from {others} others; "
                f"expected {others or 'questions of other relations (questions.demonstrations)'} or more, or 0"
            )
        numbers[relation] = num_shots // max(1, others)
    drawn, questions = dict[str, list[PopQuestion]](), list(evaluated or ())
    for relation, own in by_relation.items():
        if evaluated is None:
            drawn[relation], left = hold_out_demonstrations(own, max(numbers.values()), seed)
            questions += left
        else:
            drawn[relation] = draw_demonstrations(own, evaluated, max(numbers.values()), seed)
    shots = {}
    for relation, number in numbers.items():
        given = [shot for other in drawn if other != relation for shot in drawn[other][:number]]
        order = np.random.default_rng([seed, 4]).permutation(len(given))
        shots[relation] = tuple(given[place] for place in order)
    return sorted(questions, key=lambda question: question.relation), shots


# Popularity -----------------------------------------------------------------------------------------------------------


def popularity_bin(popularity: float) -> str:
    """Return the bin, a power of ten like `popularity 10^2-10^3` (including its lower end), or `popularity 0`."""
    if popularity < 1:
        return "popularity 0"
    power = len(str(int(popularity))) - 1  # a logarithm may round 1,000 down
    return f"popularity 10^{power}-10^{power + 1}"


# The evaluation -------------------------------------------------------------------------------------------------------


class PopQa(FewShotTask):
    """PopQA's questions, ordered by relation, so that a local LM reads each opening once.

    Few-shot answers end at the first newline. Zero-shot answers do not, since LMs may begin with a blank line, which
    the official code skips; their confidence covers all tokens.
    """

    reads = (*FewShotTask.reads, "questions.demonstrations", "questions.max_new_tokens")
    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("accuracy"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
        "lm_calls": Metric("lm_calls"),
        "retriever_calls": Metric("retriever_calls"),
        "prompt_tokens": Metric("prompt_tokens", may_be_unknown=True),
        "generated_tokens": Metric("generated_tokens"),
        "shots": Metric("shots"),  # demonstrations that fit
    }

    @classmethod
    def read(cls, config: EvaluationConfig) -> Self:
        """Draw the questions, and the shots of each relation."""
        keys = config.questions
        num_shots = NUM_SHOTS if keys.shots is None else keys.shots
        drawn = read_popqa(str(keys.path))
        if keys.demonstrations:
            drawn = draw_questions(drawn, keys.max_questions, config.seed)
            drawn, shots = plan_shots(read_popqa(keys.demonstrations), drawn, num_shots, config.seed)
        else:
            drawn, shots = plan_shots(drawn, None, num_shots, config.seed)
            drawn = draw_questions(drawn, keys.max_questions, config.seed)
        return cls(drawn, shots, keys.max_new_tokens)

    @staticmethod
    def block(question: OpenQuestion, document: str | None) -> str:
        return (
            f"{'' if document is None else document.strip() + BETWEEN_BLOCKS}Q: {one_line(question.example.query)} A:"
        )

    @staticmethod
    def answer_of(question: PopQuestion) -> str:
        return one_line(question.object)

    def groups(self, row: int) -> tuple[str, ...]:
        return (self.questions[row].relation, popularity_bin(self.questions[row].popularity))

    def stop(self, row: int) -> str | None:
        return STOP if self._shots[self.questions[row].relation] else None

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        question, by = self.questions[row], {one.name: one for one in self.book.methods}[method]
        prediction = first_line(generated.text)
        calls, prompt, new = generated.num_prompts, generated.prompt_tokens, generated.num_tokens
        if written := self.book.written(by, row):  # count the document written by the LM
            known_tokens = prompt is not None and written.prompt_tokens is not None
            calls, new = calls + 1, new + written.generated_tokens
            prompt = (prompt or 0) + (written.prompt_tokens or 0) if known_tokens else None
        similarities = self.book.similarities(by, row)
        known = {
            "accuracy": float(contains_answer(prediction, question.answers)),
            "answer_recall": float(any(has_answer(text, question.answers) for text in evidence.texts if text)),
            "popularity": question.popularity,
            "lm_calls": calls,
            "retriever_calls": len(similarities) > 0,
            "prompt_tokens": prompt,
            "generated_tokens": new,
            "mean_logprob": generated.mean_logprob,
            "mean_entropy": generated.mean_entropy,
            "top_score": next(iter(similarities), None),
        }
        detail = {
            "answer": prediction,
            "relation": question.relation,
            "subject": question.subject,
            **evidence.final(generated.weights),
        }
        return Outcome({name: float(value) for name, value in known.items() if value is not None}, detail)
