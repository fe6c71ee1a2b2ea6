"""MMLU: the letter that the LM finds likeliest after the question, mixed over documents (REPLUG, section 6.2).

The paper's "All" is called the mean of four categories, which is 69.75 for Codex and not the 68.3 that is printed. So
there are three means, each under its own name.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished, PromptedLM
from replug.evals.loop import Item, Metric, Outcome, Outcomes
from replug.evals.mmlu import (
    CATEGORY_OF,
    CONTINUATIONS,
    LETTERS,
    NUM_DEMONSTRATIONS,
    MmluPrompts,
    MmluQuestion,
    MmluSet,
    ShotDocuments,
    mmlu_choice,
    read_mmlu,
)
from replug.evals.questions import queries_of, question_problems
from replug.models.black_box_lm import AsyncLM


class Mmlu:
    """A `Task`. The letters of one prompt are asked together, so that a local LM reads the prompt once."""

    # Over questions, as the official evaluation; over subjects; over the four categories, as the paper's caption.
    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("correct"),
        "accuracy_macro": Metric("correct_share", "share"),
        "accuracy_categories": Metric("correct_category_share", "category_share"),
        "right_probability": Metric("right_probability"),
        "shots": Metric("shots"),  # demonstrations that fitted
        "accuracy_best_document": Metric("correct_best_document", may_be_unknown=True),  # by an oracle
    }

    def __init__(self, lm: AsyncLM, prompts: MmluPrompts, questions: Sequence[MmluQuestion]) -> None:
        self._lm, self._prompts, self._questions = lm, prompts, questions
        subjects = [question.example.group for question in questions]
        self._sizes = Counter([*subjects, *(CATEGORY_OF[subject] for subject in subjects)])
        self.examples = [question.example for question in questions]

    def groups(self, example: Item) -> tuple[str, ...]:
        return (CATEGORY_OF[example.group], example.group)

    def stratum(self, example: Item) -> str:
        return example.group

    def compared(self, row: int) -> tuple[str, ...]:
        question = self._questions[row]
        return question.example.query, " ".join((question.example.query, *question.choices))

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self._questions[row]
        asked = {name: self._prompts.of(question, name, one) for name, one in evidence.items()}
        by_opening: dict[str, set[str]] = {}
        for one in asked.values():
            by_opening.setdefault(one.opening, set()).update(one.prompts)
        waiting = [(opening, self._ask(opening, sorted(prompts))) for opening, prompts in sorted(by_opening.items())]

        def finish() -> Outcomes:
            letters = {(opening, prompt): some for opening, ask in waiting for prompt, some in ask().items()}
            found = {
                name: np.stack([letters[one.opening, prompt] for prompt in one.prompts]) for name, one in asked.items()
            }
            return {
                name: self._outcome(question, found[name], one.logits, asked[name].num_shots)
                for name, one in evidence.items()
            }

        return finish

    def _ask(self, opening: str, prompts: Sequence[str]) -> Callable[[], dict[str, np.ndarray]]:
        """The four letters' log-probs [4] by prompt; what is asked together is one call, in the texts' order."""
        repeated = [prompt for prompt in prompts for _ in LETTERS]
        future = self._lm.submit(repeated, list(CONTINUATIONS) * len(prompts), opening=opening)

        def answers() -> dict[str, np.ndarray]:
            letters = np.array([score.sum_logprob for score in future.result()]).reshape(len(prompts), len(LETTERS))
            return dict(zip(prompts, letters, strict=True))

        return answers

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self._questions[row]
        asked = self._prompts.of(question, method, evidence)
        return {"references": [LETTERS[question.answer]], "prompt": asked.prompts[0]}

    def _outcome(
        self, question: MmluQuestion, letters: np.ndarray, similarities: np.ndarray, num_shots: int
    ) -> Outcome:
        """From log-probs [K, 4] and similarities [K]."""
        choice, right_probability = mmlu_choice(question, letters, similarities)
        is_correct = choice == question.answer
        share = 1.0 / self._sizes[question.example.group]
        category_share = 1.0 / self._sizes[CATEGORY_OF[question.example.group]]
        numbers = {
            "correct": float(is_correct),
            "correct_share": share * is_correct,
            "share": share,
            "correct_category_share": category_share * is_correct,
            "category_share": category_share,
            "right_probability": right_probability,
            "shots": float(num_shots),
            "correct_best_document": float((letters.argmax(axis=1) == question.answer).any()),
        }
        return Outcome(numbers, {"answer": LETTERS[choice], "right": LETTERS[question.answer]})


def mmlu_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """The first questions of every subject; the demonstrations are searched for behind them."""
    mmlu = read_mmlu(Path(str(config.questions.path)).expanduser(), _num_shots(config))
    by_subject = {name: [q for q in mmlu.questions if q.example.group == name] for name in mmlu.demonstrations}
    questions = [question for some in by_subject.values() for question in some[: config.questions.max_questions]]

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> Mmlu:
        from replug.models.build import counting_template  # brings torch: only once the configuration is checked

        assert asked is not None
        documents = _shot_documents(book, mmlu, len(questions), config.questions.documents_in_shots)
        prompts = MmluPrompts(asked.template, counting_template(asked.source), mmlu.demonstrations, documents)
        return Mmlu(asked.lm, prompts, questions)

    shots = [shot for some in mmlu.demonstrations.values() for shot in some]
    examples = [question.example for question in (*questions, *shots)]
    return EvalDataset(queries_of(config, examples), make_task, [example.query for example in examples])


def _num_shots(config: EvaluationConfig) -> int:
    return NUM_DEMONSTRATIONS if config.questions.shots is None else config.questions.shots


def _shot_documents(book: EvidenceBook, mmlu: MmluSet, first: int, wanted: bool) -> ShotDocuments:
    """The nearest document of each demonstration, whose rows begin at `first`, in the order of subjects."""
    places: dict[str, range] = {}
    at = first
    for subject, shots in mmlu.demonstrations.items():
        places[subject] = range(at, at + len(shots))
        at += len(shots)
    return {
        method.name: {
            subject: [book.nearest(method, place) for place in of] if wanted else None for subject, of in places.items()
        }
        for method in book.methods
    }


def dropped_shots(finished: Finished) -> str:
    """How many questions had fewer demonstrations than were asked for, by method; nothing where none had."""
    lines, wanted = "", _num_shots(finished.config)
    for method in finished.book.methods:
        fewer = sum(row["methods"][method.name]["numbers"]["shots"] < wanted for row in finished.rows)
        if fewer:
            lines += (
                f"\n{method.name}: {fewer} of {len(finished.rows)} questions had fewer than {wanted} demonstrations, "
                "since the LM holds no more tokens.\n"
            )
    return lines


EVALUATION = EvaluationKind(mmlu_dataset, question_problems, add_findings=dropped_shots)
