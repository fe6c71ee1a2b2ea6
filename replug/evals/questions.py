"""Questions: read them, draw them, search for them and put them into prompts, for all evaluations of questions.

A set has rows with `question` and `answers`, and optional `id`, `domain` and `gold` (ids of documents).

The prompt of mmlu, open_qa and popqa has the demonstrations of the question's group, each with its first retrieved
document, then the question with its document. If a prompt exceeds the LM's context, the earliest demonstrations are
dropped (`answering.prompts.fit_shots`), and the table shows the number of such questions. If a question does not fit
without demonstrations, lm.too_long=truncate cuts its document; otherwise the question is refused by name.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from replug.answering.prompts import BETWEEN_BLOCKS, STOP, fit_shots
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.rules import QUESTION
from replug.data.answers import normalize_answer
from replug.data.rows import ids_of, one_line, question_rows, require_new, texts_of
from replug.data.sources.records import say_unread
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.loop import Item, Outcome, Outcomes, PromptedLM, Row, Task
from replug.evals.results import Results
from replug.evals.tables import Block, Blocks
from replug.models.black_box_lm import UnscorableText
from replug.models.generation import Generated, GenerationOptions
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate

DRAWS_QUESTIONS = ("questions.path", "questions.query", "questions.max_questions")  # shared by evaluations of questions
DROPPED = "dropped_shots"
PUBLISHED_SETS = json.loads(Path(__file__).with_name("published_sets.json").read_text(encoding="utf-8"))
QUESTION_FIELDS = ("id", "question", "answers", "domain", "source", "gold", "candidates")


def knowledge_line(document: str | None) -> str:
    """Return `Knowledge: ...` with its newline; empty without a document."""
    return "" if document is None else f"Knowledge: {one_line(document)}\n"


def first_line(generated: str) -> str:
    """Return the first line of an answer, after an optional blank line, like the code of PopQA."""
    return generated.removeprefix(BETWEEN_BLOCKS).partition(STOP)[0].strip()


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question, `example.query`, and its accepted answers; demonstrations show the first."""

    example: Item
    answers: tuple[str, ...]


Question = TypeVar("Question", bound=OpenQuestion)


def read_questions(
    source: str | Path, fields: Mapping[str, str] | None = None, needs_answers: bool = True
) -> list[OpenQuestion]:
    """Read rows of any format; a question without `id` is named by file and line.

    Raises UserError with file and line for a missing or malformed field.
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
    """Read the question of each row. Raises UserError for a repeated id, and for no questions."""
    questions: list[Question] = []
    seen: set[str] = set()
    for where, row in rows:
        questions.append(read(row, where))
        require_new(questions[-1].example.id, seen, where)
    if not questions:
        raise UserError(f"{path} holds no questions")
    return questions


def text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """Return a text field. Raises UserError, naming `where`, for a missing or blank one."""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        named = ", ".join(row) or "none"
        raise UserError(f"{where}: field {field!r} must be a text, found {value!r}; the fields here are {named}")
    return value


def name_of(row: Mapping[str, Any], fields: Sequence[str], where: str) -> str | None:
    """Return the first present field of `fields`, a string or an integer, as text; None if all are missing."""
    field = next((field for field in fields if row.get(field) is not None), None)
    if field is None:
        return None
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{where}: field {field!r} must be a string or an integer, found {value!r}")
    return str(value)


def answers_field(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """Return the only one of the names that is a field of the row. Raises UserError unless there is exactly one."""
    given = [name for name in names if row.get(name) is not None]
    if len(given) != 1:
        expected = " or ".join(map(repr, names))
        raise UserError(f"{where}: expected the field {expected}, found {' and '.join(given) or 'neither'}")
    return given[0]


def open_question(
    row: Mapping[str, Any], where: str, answers: str = "answers", needs_answers: bool = True
) -> OpenQuestion:
    """Read the question of a row. Raises UserError for a missing or malformed field."""
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
    """Draw demonstrations uniformly from the pool by the seed, excluding evaluated questions.

    A question counts as evaluated by its id or its normalised text. No two demonstrations have the same text. Raises
    UserError if the pool has too few.
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
    """Draw demonstrations from the evaluated file; return them and the remaining questions, in order.

    Raises UserError if no question would remain.
    """
    demonstrations = draw_demonstrations(questions, (), num, seed)
    evaluated = not_among(questions, demonstrations)
    if not evaluated:
        raise UserError(f"{num} demonstrations leave none of {len(questions)} questions to evaluate; ask for fewer")
    return demonstrations, evaluated


def not_among(questions: Sequence[Question], others: Iterable[OpenQuestion]) -> list[Question]:
    """Return the questions that differ from all others, by id and by normalised text."""
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
    """Draw `num` questions by the seed, in the file's order; None or too large a number means all."""
    if num is None or num >= len(questions):
        return questions
    rows = np.random.default_rng([seed, 3]).choice(len(questions), size=num, replace=False)
    return [questions[row] for row in sorted(rows)]


# Few-shot prompts -----------------------------------------------------------------------------------------------------

ShotWithDocument = tuple[Any, str | None]  # a question of the task's type, and its document


@dataclass(frozen=True, slots=True)
class FewShotPrompts:
    """The prompts [K] of a question under a method, one for each text, all beginning with `opening`."""

    opening: str
    prompts: tuple[str, ...]
    num_shots: int
    num_dropped: int

    @property
    def numbers(self) -> dict[str, float]:
        """Return the numbers of demonstrations for an outcome."""
        return {"shots": float(self.num_shots), DROPPED: float(self.num_dropped)}


class FewShotTask(Task):
    """Ask questions, which have `example` and `answers`, with demonstrations before them.

    `shots` are the demonstrations of each group; their queries follow the questions' queries. `num_new` tokens are
    reserved after a prompt.
    """

    reads: ClassVar[tuple[str, ...]] = ("ensemble", "retrievers", *DRAWS_QUESTIONS, "questions.shots")

    def __init__(
        self,
        questions: Sequence[Any],
        shots: Mapping[str, Sequence[Any]],
        num_new: int,
    ) -> None:
        self.questions, self._shots, self._num_new = questions, shots, num_new
        self.examples = [question.example for question in questions]
        self._shown = {shot.example.id: shot for own in shots.values() for shot in own}
        self.asked = [question.example.query for question in self._searched]

    @classmethod
    def read(cls, config: EvaluationConfig) -> Self:
        """Read questions and demonstrations."""
        raise NotImplementedError

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        """Read the task. Raises UnscorableText for a question that does not fit without demonstrations and document."""
        from replug.models.build import prompt_template  # brings torch: only once the configuration is checked

        assert source is not None
        task = cls.read(config)
        task.queries = task.queries_of(config, task._searched)
        task.prompt_by(prompt_template(config.lm, source), source)
        for question in task.questions:
            task.fit(question, (), [None])
        return task

    @property
    def _searched(self) -> list[Any]:
        return [*self.questions, *self._shown.values()]

    def queries_of(self, config: EvaluationConfig, questions: Sequence[Any]) -> list[str]:
        """Return the search queries of questions."""
        return queries_of(config, [question.example for question in questions])

    def prompt_by(self, template: PromptTemplate, source: LMSource | None) -> None:
        """Set the template of prompts, and the counter of tokens for the LM's limit."""
        from replug.models.build import counting_template

        self._template, self._counting = template, counting_template(source)

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        super().open(lms, book)
        assert lms is not None
        self.lm = lms.lm
        self.prompt_by(lms.template, lms.source)
        places = {name: len(self.questions) + place for place, name in enumerate(self._shown)}
        documents = {
            (method.name, name): book.nearest(method, place)
            for method in book.methods
            for name, place in places.items()
        }
        self._shots_of: dict[tuple[str, str], list[ShotWithDocument]] = {
            (method.name, group): [(shot, documents[method.name, shot.example.id]) for shot in own]
            for method in book.methods
            for group, own in self._shots.items()
        }

    @staticmethod
    def block(question: Any, document: str | None) -> str:
        """Return the block of a question in a prompt, with its document if there is one."""
        raise NotImplementedError

    @staticmethod
    def answer_of(question: Any) -> str:
        """Return the answer of a demonstration."""
        return one_line(question.answers[0])

    @classmethod
    def opening(cls, shots: Sequence[ShotWithDocument]) -> str:
        """Return the demonstrations, the common opening of a group's prompts."""
        return "".join(f"{cls.block(shot, text)} {cls.answer_of(shot)}{BETWEEN_BLOCKS}" for shot, text in shots)

    @classmethod
    def prompt(cls, question: Any, shots: Sequence[ShotWithDocument] = (), document: str | None = None) -> str:
        """Return the prompt: the demonstrations, then the question."""
        return cls.opening(shots) + cls.block(question, document)

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        """Return the outcome of an answer."""
        raise NotImplementedError

    def stop(self, row: int) -> str | None:
        """Return the stop text of answers, None for no stop."""
        return STOP

    def compared(self, row: int) -> tuple[str, ...]:
        return self.questions[row].example.query, *self.questions[row].answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        prompts = {name: self.prompts(row, name, one) for name, one in evidence.items()}
        futures: dict[str, Future[Generated]] = {}
        for name, asked in prompts.items():
            options = GenerationOptions(self._num_new, self.stop(row), opening=asked.opening)
            futures[name] = evidence[name].submit(self.lm, asked.prompts, options)

        def finish() -> Outcomes:
            outcomes = {name: self.outcome(row, name, evidence[name], one.result()) for name, one in futures.items()}
            for name, outcome in outcomes.items():
                outcome.numbers.update(prompts[name].numbers)
            return outcomes

        return finish

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        references = list(self.questions[row].answers)
        return {"references": references, "prompt": self.prompts(row, method, evidence).prompts[0]}

    def prompts(self, row: int, method: str, evidence: Evidence) -> FewShotPrompts:
        """Return the prompts of a question under a method, one for each text of its evidence."""
        question = self.questions[row]
        shots = self._shots_of[method, question.example.group]
        return self.fit(question, shots, evidence.texts, evidence.is_concatenated)

    def fit(
        self,
        question: Any,
        shots: Sequence[ShotWithDocument],
        texts: Sequence[str | None],
        keep_end: bool = False,
    ) -> FewShotPrompts:
        """Return the prompts of a question for each text, with the last shots that fit.

        Raises UnscorableText if the question does not fit without shots.
        """
        name, num, template = question.example.id, self._num_new, self._template

        def fits(shots: Sequence[ShotWithDocument]) -> bool:
            build = template.around(partial(self.prompt, question, shots))
            return all(self._counting.holds(build(text), num) for text in texts)

        kept = fit_shots(shots, fits)
        build = template.around(partial(self.prompt, question, kept))
        if not kept and not template.cuts and not fits(kept):
            most = max(self._counting.num_tokens(build(text)) for text in texts)
            fix_hint = "shorter documents, or lm.too_long=truncate, which cuts them"
            raise UnscorableText(
                f"question {name}: its prompt has {most} tokens even without demonstrations, and the LM holds "
                f"{self._counting.max_tokens}, {num} of them for the answer; expected "
                f"{fix_hint if any(texts) else 'a shorter question, or an LM that holds more'}"
            )
        prompts = [template.fit(text, build, num, keep_end, name) for text in texts]
        return FewShotPrompts(template.opening(self.opening(kept)), tuple(prompts), len(kept), len(shots) - len(kept))

    def findings(self, rows: Sequence[Row], results: Results, folder: Any) -> Blocks:
        return dropped_shots(rows, results)


def dropped_shots(rows: Sequence[Row], results: Results) -> list[Block]:
    """Return a line for each method with dropped demonstrations: the numbers of its questions and of its drops."""
    lines: list[Block] = []
    for method in results:
        dropped = [int(row["methods"][method]["numbers"][DROPPED]) for row in rows]
        if any(dropped):
            lines.append(
                f"{method}: {sum(map(bool, dropped))} of {len(dropped)} questions lost their earliest "
                f"demonstrations, {sum(dropped)} in all: the LM holds no more tokens."
            )
    return lines
