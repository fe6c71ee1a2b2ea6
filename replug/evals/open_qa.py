"""Open-domain question answering: exact match of a greedy short answer after demonstrations (REPLUG, section 6.3).

The prompt has demonstrations with a document each, then document and question (REPLUG, appendix: prompts for MMLU and
open-domain QA). The LM's answer ends at the first newline and is compared with every accepted answer
(`data.answers`).

The retrieved document comes after the demonstrations, so all prompts of a question share a prefix: a server with a
prefix cache computes the demonstrations once.
"""

from collections.abc import Mapping
from typing import Any, Self

from replug.answering.prompts import STOP
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.answers import exact_match, has_answer, token_f1
from replug.data.rows import question_prompt
from replug.evals.evidence import Evidence
from replug.evals.loop import Metric, Outcome
from replug.evals.questions import (
    FewShotTask,
    draw_demonstrations,
    draw_questions,
    hold_out_demonstrations,
    knowledge_line,
    read_questions,
)
from replug.models.generation import Generated

NUM_DEMONSTRATIONS = 16


class OpenQa(FewShotTask):
    """Short answers, compared with the accepted answers after normalisation."""

    reads = (*FewShotTask.reads, "questions.demonstrations", "questions.max_new_tokens")
    metrics: Mapping[str, Metric] = {
        "exact_match": Metric("exact_match"),
        "f1": Metric("f1"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
        "shots": Metric("shots"),  # demonstrations that fit
    }

    @classmethod
    def read(cls, config: EvaluationConfig) -> Self:
        """Draw questions, and demonstrations shared by all questions."""
        keys = config.questions
        num_shots = NUM_DEMONSTRATIONS if keys.shots is None else keys.shots
        pool = read_questions(str(keys.path), config.data.fields)
        if keys.demonstrations:
            questions = draw_questions(pool, keys.max_questions, config.seed)
            pool_of_shots = read_questions(keys.demonstrations, config.data.fields)
            shots = draw_demonstrations(pool_of_shots, questions, num_shots, config.seed)
        else:
            shots, rest = hold_out_demonstrations(pool, num_shots, config.seed)
            questions = draw_questions(rest, keys.max_questions, config.seed)
        return cls(questions, {question.example.group: shots for question in questions}, keys.max_new_tokens)

    @staticmethod
    def block(question: Any, document: str | None) -> str:
        return knowledge_line(document) + question_prompt(question.example.query)

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        answers = self.questions[row].answers
        prediction = generated.text.partition(STOP)[0].strip()
        numbers = {
            "exact_match": exact_match(prediction, answers),
            "f1": token_f1(prediction, answers),
            "answer_recall": float(any(has_answer(text, answers) for text in evidence.texts if text is not None)),
        }
        return Outcome(numbers, {"answer": prediction, **evidence.final(generated.weights)})
