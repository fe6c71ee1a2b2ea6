"""What the evaluations of questions share: which keys they need, which questions are drawn, what is searched for."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.config.methods import GENREAD, LONG_CONTEXT, Method
from replug.config.rules import QUESTION
from replug.evals.examples import Example
from replug.evals.open_qa import Question


def question_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    if not config.questions.path:
        yield f"questions.path is missing; evaluation={config.evaluation} expects the questions"
    if any(method.source == LONG_CONTEXT for method in methods):
        yield f"methods: long_context reads on in a text; evaluation={config.evaluation} asks questions"


def unasked_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    """What only evaluations have that put questions to an LM."""
    if any(method.source == GENREAD for method in methods):
        yield f"methods: genread writes a document for a question; evaluation={config.evaluation} asks the LM none"
    if config.questions.latency_questions:
        yield (
            f"questions.latency_questions is {config.questions.latency_questions}, but "
            f"evaluation={config.evaluation} asks the LM no questions; expected 0"
        )


def demonstration_seed(keys: QuestionsConfig, seed: int) -> int:
    """Return the seed that draws the demonstrations."""
    return seed if keys.demonstration_seed is None else keys.demonstration_seed


def queries_of(config: EvaluationConfig, examples: Iterable[Example]) -> list[str]:
    """The questions in the form of `questions.query`."""
    return [config.questions.query.replace(QUESTION, example.query) for example in examples]


def draw_questions(questions: list[Question], num: int | None, seed: int) -> list[Question]:
    """So many questions, drawn by the seed, in the file's order; all where there are no more."""
    if num is None or num >= len(questions):
        return questions
    rows = np.random.default_rng([seed, 3]).choice(len(questions), size=num, replace=False)
    return [questions[row] for row in sorted(rows)]
