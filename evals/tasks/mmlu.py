"""MMLU: the letter that the LM finds likeliest after the question, mixed over documents (REPLUG, section 5.2)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.configs.schema import EvaluationConfig
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook, texts_of
from replug.evals.examples import Example
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes
from replug.evals.mmlu import (
    CONTINUATIONS,
    LETTERS,
    NUM_DEMONSTRATIONS,
    MmluQuestion,
    MmluSet,
    any_document_right,
    mmlu_outcome,
    mmlu_prompt,
    read_mmlu,
)
from replug.evals.mmlu_subjects import CATEGORY_OF
from replug.evals.questions import queries_of, question_problems
from replug.models.black_box_lm import AsyncLM
from replug.models.prompt import PromptTemplate

ROOM = 4  # tokens kept free for a letter: one in all vocabularies known to us


class Mmlu:
    """A `Task`. The letters of one prompt are asked together, so that a local LM reads the prompt once."""

    # Micro: the mean over questions, as the official evaluation has it; macro: over subjects.
    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("correct"),
        "accuracy_macro": Metric("correct_share", "share"),
        "right_probability": Metric("right_probability"),
        "accuracy_best_document": Metric("correct_best_document", may_be_unknown=True),  # by an oracle
    }

    def __init__(self, lm: AsyncLM, template: PromptTemplate, questions: Sequence[MmluQuestion], mmlu: MmluSet) -> None:
        self._lm, self._template, self._questions = lm, template, questions
        self._demonstrations = mmlu.demonstrations
        self._sizes = Counter(question.example.group for question in questions)
        self.examples = [question.example for question in questions]

    def groups(self, example: Example) -> tuple[str, ...]:
        return (CATEGORY_OF[example.group], example.group)

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question, texts = self._questions[row], texts_of(evidence)
        build = partial(mmlu_prompt, question, self._demonstrations[question.example.group])
        fitted = [self._template.fit(text, build, ROOM, keep_end) for text, keep_end in texts.items()]
        prompts = [prompt for prompt in fitted for _ in LETTERS]
        future = self._lm.submit(prompts, list(CONTINUATIONS) * len(texts))

        def finish() -> Outcomes:
            letters = np.array([score.sum_logprob for score in future.result()]).reshape(len(texts), len(LETTERS))
            by_text = dict(zip(texts, letters, strict=True))
            return {
                name: self._outcome(question, np.stack([by_text[text] for text in one.texts]), one.logits)
                for name, one in evidence.items()
            }

        return finish

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self._questions[row]
        build = partial(mmlu_prompt, question, self._demonstrations[question.example.group])
        prompt = self._template.fit(evidence.texts[0], build, ROOM, evidence.is_concatenated)
        return {"references": [LETTERS[question.answer]], "prompt": prompt}

    def _outcome(self, question: MmluQuestion, letters: np.ndarray, similarities: np.ndarray) -> Outcome:
        """From log-probs [K, 4] and similarities [K]."""
        found = mmlu_outcome(question, letters, similarities)
        share = 1.0 / self._sizes[question.example.group]
        numbers = {
            "correct": float(found.is_correct),
            "correct_share": share * found.is_correct,
            "share": share,
            "right_probability": found.right_probability,
            "correct_best_document": float(any_document_right(question, letters)),
        }
        return Outcome(numbers, {"answer": LETTERS[found.prediction], "right": LETTERS[question.answer]})


def mmlu_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """The first questions of every subject."""
    shots = NUM_DEMONSTRATIONS if config.questions.shots is None else config.questions.shots
    mmlu = read_mmlu(Path(str(config.questions.path)).expanduser(), shots)
    by_subject = {name: [q for q in mmlu.questions if q.example.group == name] for name in mmlu.demonstrations}
    questions = [question for some in by_subject.values() for question in some[: config.questions.max_questions]]

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> Mmlu:
        assert asked is not None
        return Mmlu(asked.lm, asked.template, questions, mmlu)

    examples = [question.example for question in questions]
    return EvalDataset(queries_of(config, examples), make_task, [example.query for example in examples])


EVALUATION = EvaluationKind(mmlu_dataset, question_problems)
