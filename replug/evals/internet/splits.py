"""Which questions are shown, which are measured, and on which of these weights are fitted.

Variants of one question (`InternetQuestion.origin`) are on one side of every border.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import QuestionsConfig
from replug.data.hashing import hash64
from replug.evals.internet.gold import tells_evidence
from replug.evals.internet.questions import InternetQuestion, QuestionSet
from replug.evals.open_qa import draw_demonstrations, not_among
from replug.evals.questions import demonstration_seed, draw_questions

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


def plan_questions(keys: QuestionsConfig, of: QuestionSet, seed: int, with_evidence: bool = True) -> InternetQuestions:
    """Read and drawn by the seed; `with_evidence`, shots have some. Raises UserError where there are too few."""
    num_shots = NUM_SHOTS if keys.shots is None else keys.shots
    questions = of.read(Path(str(keys.path)).expanduser())
    if keys.demonstrations is not None:
        measured = draw_questions(questions, keys.max_questions, seed)
        pool = of.read_shots(Path(keys.demonstrations).expanduser())
        free = _telling(pool, with_evidence, num_shots, keys.demonstrations, measured)
        shots = tuple(draw_demonstrations(free, measured, num_shots, demonstration_seed(keys, seed)))
        return InternetQuestions(tuple(measured), shots)
    free = _telling(questions, with_evidence, num_shots, str(keys.path))
    shots = tuple(draw_demonstrations(free, (), num_shots, seed))
    rest = not_among(_without(questions, shots), shots)
    if not rest:
        raise UserError(f"{num_shots} shots leave none of {len(questions)} questions to measure; ask for fewer")
    return InternetQuestions(tuple(draw_questions(rest, keys.max_questions, seed)), shots)


def _telling(
    pool: Sequence[InternetQuestion],
    with_evidence: bool,
    num: int,
    path: str,
    measured: Sequence[InternetQuestion] = (),
) -> list[InternetQuestion]:
    """Those that may be shots: none that is measured, none without evidence, no two variants of one question."""
    free = [one for one in _without(pool, measured) if not with_evidence or tells_evidence(one)]
    of_each = list({question.origin: question for question in reversed(free)}.values())[::-1]
    if len(of_each) < num:
        raise UserError(
            f"{num} shots are asked for, but {len(of_each)} of {len(pool)} questions in {path} "
            f"{'have gold evidence and ' if with_evidence else ''}are not measured; expected more of them "
            "(questions.demonstrations), or fewer shots (questions.shots)"
        )
    return of_each


def _without(questions: Sequence[InternetQuestion], others: Sequence[InternetQuestion]) -> list[InternetQuestion]:
    origins = {other.origin for other in others}
    return [question for question in questions if question.origin not in origins]
