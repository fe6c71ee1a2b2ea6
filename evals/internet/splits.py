"""Which questions are shown, which are measured, and on which of these weights are fitted.

Variants of one question (`InternetQuestion.origin`) are on one side of every border.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.schema import QuestionsConfig
from replug.data.hashing import hash64
from replug.evals.internet.gold import tells_evidence
from replug.evals.internet.questions import InternetQuestion, QuestionSet
from replug.evals.open_qa import draw_demonstrations, not_among
from replug.evals.questions import draw_questions

NUM_SHOTS = 15
VALIDATION_PARTS = 10  # one of so many parts by the hash


@dataclass(frozen=True, slots=True)
class InternetQuestions:
    """What is measured, in the file's order, and what is shown before each, in the order shown."""

    measured: tuple[InternetQuestion, ...]
    shots: tuple[InternetQuestion, ...]


def is_validation(question: InternetQuestion) -> bool:
    """Whether weights may be fitted on it: a tenth of all, which follows from the question alone."""
    return hash64(question.origin) % VALIDATION_PARTS == 0


def plan_questions(keys: QuestionsConfig, of: QuestionSet, seed: int) -> InternetQuestions:
    """Read and drawn by the seed. Raises UserError where there are too few."""
    num_shots = NUM_SHOTS if keys.shots is None else keys.shots
    questions = of.read(Path(str(keys.path)).expanduser())
    if keys.demonstrations is not None:
        measured = draw_questions(questions, keys.max_questions, seed)
        pool = of.read_shots(Path(keys.demonstrations).expanduser())
        return InternetQuestions(tuple(measured), _draw(pool, measured, num_shots, keys.demonstrations, seed))
    shots = _draw(questions, (), num_shots, str(keys.path), seed)
    rest = not_among(_without(questions, shots), shots)
    if not rest:
        raise UserError(f"{num_shots} shots leave none of {len(questions)} questions to measure; ask for fewer")
    return InternetQuestions(tuple(draw_questions(rest, keys.max_questions, seed)), shots)


def _draw(
    pool: Sequence[InternetQuestion], measured: Sequence[InternetQuestion], num: int, path: str, seed: int
) -> tuple[InternetQuestion, ...]:
    """Of those that tell their evidence and are not measured, no two variants of one question."""
    free = list(
        {question.origin: question for question in _without(pool, measured) if tells_evidence(question)}.values()
    )
    if len(free) < num:
        raise UserError(
            f"{num} shots are asked for, but {len(free)} of {len(pool)} questions in {path} have gold evidence and are "
            "not measured; expected more of them (questions.demonstrations), or fewer shots (questions.shots)"
        )
    return tuple(draw_demonstrations(free, measured, num, seed))


def _without(questions: Sequence[InternetQuestion], others: Sequence[InternetQuestion]) -> list[InternetQuestion]:
    origins = {other.origin for other in others}
    return [question for question in questions if question.origin not in origins]
