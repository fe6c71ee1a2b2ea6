"""Open-domain question answering: exact match of a greedy short answer after demonstrations (REPLUG, section 6.3)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.data.store import Corpus
from replug.evals.answers import exact_match, has_answer, token_f1
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Item, Metric, Outcome, Outcomes
from replug.evals.questions import (
    NUM_DEMONSTRATIONS,
    STOP,
    OpenQuestion,
    demonstration_seed,
    draw_demonstrations,
    draw_questions,
    hold_out_demonstrations,
    open_qa_opening,
    open_qa_prompt,
    queries_of,
    question_problems,
    read_questions,
)
from replug.models.black_box_lm import AsyncLM
from replug.models.ensemble import document_weights
from replug.models.generation import GenerationOptions
from replug.models.prompt import PromptTemplate

# By method, the documents that its demonstrations have; None for demonstrations without.
DemonstrationDocuments = Mapping[str, Sequence[str | None] | None]


class OpenQa:
    """A `Task`: one answer from all documents of a method, chosen token by token (a server's by whole answers)."""

    metrics: Mapping[str, Metric] = {
        "exact_match": Metric("exact_match"),
        "f1": Metric("f1"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
    }

    def __init__(
        self,
        lm: AsyncLM,
        template: PromptTemplate,
        questions: Sequence[OpenQuestion],
        demonstrations: Sequence[OpenQuestion],
        documents: DemonstrationDocuments,
        max_new_tokens: int,
    ) -> None:
        self._lm, self._template, self._questions = lm, template, questions
        self._demonstrations, self._documents = demonstrations, documents
        self._max_new_tokens = max_new_tokens
        self._options = {
            method: GenerationOptions(max_new_tokens, STOP, opening=open_qa_opening(demonstrations, given))
            for method, given in documents.items()
        }
        self.examples = [question.example for question in questions]

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group,)

    def compared(self, row: int) -> tuple[str, ...]:
        return self._questions[row].example.query, *self._questions[row].answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self._questions[row]
        futures = {
            name: self._lm.submit_ensemble(
                self._prompts(name, question, one), document_weights(one.logits).tolist(), self._options[name]
            )
            for name, one in evidence.items()
        }
        return lambda: {
            name: open_qa_outcome(question, evidence[name], future.result().text) for name, future in futures.items()
        }

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self._questions[row]
        return {"references": list(question.answers), "prompt": self._prompts(method, question, evidence)[0]}

    def _prompts(self, method: str, question: OpenQuestion, evidence: Evidence) -> list[str]:
        def build(document: str | None) -> str:
            return open_qa_prompt(question, self._demonstrations, document, self._documents[method])

        return [
            self._template.fit(text, build, self._max_new_tokens, evidence.is_concatenated) for text in evidence.texts
        ]


def open_qa_outcome(question: OpenQuestion, evidence: Evidence, text: str) -> Outcome:
    """Return how right the first line of what the LM wrote is, and whether some document holds an answer."""
    prediction = text.partition(STOP)[0].strip()
    recall = any(has_answer(document, question.answers) for document in evidence.texts if document is not None)
    numbers = {
        "exact_match": exact_match(prediction, question.answers),
        "f1": token_f1(prediction, question.answers),
        "answer_recall": float(recall),
    }
    return Outcome(numbers, {"answer": prediction})


def open_qa_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Drawn questions; those that demonstrations are made of are searched for behind them."""
    keys = config.questions
    questions, demonstrations = _drawn(keys, config.seed)

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> OpenQa:
        assert asked is not None
        places = range(len(questions), len(questions) + len(demonstrations))
        documents = {
            method.name: [book.nearest(method, place) for place in places] if keys.documents_in_shots else None
            for method in book.methods
        }
        return OpenQa(asked.lm, asked.template, questions, demonstrations, documents, keys.max_new_tokens)

    asked_for = [question.example for question in [*questions, *demonstrations]]
    return EvalDataset(queries_of(config, asked_for), make_task, [example.query for example in asked_for])


def _drawn(keys: QuestionsConfig, seed: int) -> tuple[list[OpenQuestion], list[OpenQuestion]]:
    """Questions, and demonstrations."""
    shots = NUM_DEMONSTRATIONS if keys.shots is None else keys.shots
    pool = read_questions(Path(str(keys.path)).expanduser())
    if keys.demonstrations:
        questions = draw_questions(pool, keys.max_questions, seed)
        shown = read_questions(Path(keys.demonstrations).expanduser())
        return questions, draw_demonstrations(shown, questions, shots, demonstration_seed(keys, seed))
    demonstrations, rest = hold_out_demonstrations(pool, shots, seed)
    return draw_questions(rest, keys.max_questions, seed), demonstrations


EVALUATION = EvaluationKind(open_qa_dataset, question_problems)
