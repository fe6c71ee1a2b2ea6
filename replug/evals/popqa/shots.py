"""Which questions of PopQA are shown before those of each relation (Mallen et al. 2023, section 4.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replug.config.errors import UserError
from replug.evals.open_qa import draw_demonstrations, hold_out_demonstrations, require_not_evaluated
from replug.evals.popqa.questions import PopQuestion

NUM_SHOTS = 15


@dataclass(frozen=True, slots=True)
class ShotPlan:
    """Which questions are asked, in order, and which are shown before those of each relation."""

    questions: tuple[PopQuestion, ...]
    shots: dict[str, tuple[PopQuestion, ...]]


def plan_shots(
    pool: Sequence[PopQuestion], evaluated: Sequence[PopQuestion] | None, num_shots: int, seed: int
) -> ShotPlan:
    """Shots of every evaluated relation: `num_shots` // (number of other relations) of each other relation, shuffled.

    The official code draws anew for every question; here each relation's are drawn once, so that the questions of a
    relation share an opening. They come from the pool and are never evaluated. With `evaluated` None, those of the
    pool that are no shots are evaluated. Raises UserError where that leaves too few questions, or there is no other
    relation.
    """
    asked = list(pool if evaluated is None else evaluated)
    if num_shots == 0:
        return ShotPlan(_by_relation(asked), {question.relation: () for question in asked})
    of_pool = _grouped(pool)
    numbers = {relation: _num_each(relation, of_pool, num_shots) for relation in _grouped(asked)}
    drawn, asked = _draw(of_pool, evaluated, max(numbers.values()), seed)
    shots = {
        relation: _shuffled([shot for other in drawn if other != relation for shot in drawn[other][:number]], seed)
        for relation, number in numbers.items()
    }
    require_not_evaluated([shot for of in shots.values() for shot in of], asked)
    return ShotPlan(_by_relation(asked), shots)


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


def _shuffled(shots: Sequence[PopQuestion], seed: int) -> tuple[PopQuestion, ...]:
    return tuple(shots[place] for place in np.random.default_rng([seed, 4]).permutation(len(shots)))


def _grouped(questions: Sequence[PopQuestion]) -> dict[str, list[PopQuestion]]:
    grouped: dict[str, list[PopQuestion]] = {}
    for question in questions:
        grouped.setdefault(question.relation, []).append(question)
    return dict(sorted(grouped.items()))


def _by_relation(questions: Sequence[PopQuestion]) -> tuple[PopQuestion, ...]:
    """In the order of relations' names, and of the file within one."""
    return tuple(question for some in _grouped(questions).values() for question in some)
