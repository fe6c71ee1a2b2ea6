"""Open-domain question answering: exact match of a greedy short answer after demonstrations (REPLUG, section 6.3).

REPLUG asks after demonstrations with a document each, then document and question (appendix: prompts for MMLU and
open-domain QA). The LM's answer ends at the first newline and is compared with every accepted answer
(`data.answers`).

Demonstrations come first and the retrieved document after them, so the prompts of one question begin alike whatever
document they hold: a server that keeps prefixes computes the demonstrations once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.answers import exact_match, has_answer, token_f1
from replug.data.rows import one_line, question_prompt
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes, Task
from replug.evals.questions import (
    BETWEEN_BLOCKS,
    STOP,
    OpenQuestion,
    demonstration_seed,
    draw_demonstrations,
    draw_questions,
    hold_out_demonstrations,
    knowledge_line,
    queries_of,
    question_problems,
    read_questions,
)
from replug.models.black_box_lm import AsyncLM
from replug.models.generation import Generated, GenerationOptions
from replug.models.prompt import PromptTemplate

NUM_DEMONSTRATIONS = 16
# By method, the documents that its demonstrations have; None for demonstrations without.
DemonstrationDocuments = Mapping[str, Sequence[str | None] | None]


class OpenQa(Task):
    """Writes one answer from all documents of a method, token by token (a server's by whole answers)."""

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
            method: GenerationOptions(
                max_new_tokens, STOP, opening=template.opening(open_qa_opening(demonstrations, given))
            )
            for method, given in documents.items()
        }
        self.examples = [question.example for question in questions]

    def compared(self, row: int) -> tuple[str, ...]:
        return self._questions[row].example.query, *self._questions[row].answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self._questions[row]
        futures = {
            name: self._lm.submit_answer(one.mixture(self._prompts(name, question, one)), self._options[name])
            for name, one in evidence.items()
        }
        return lambda: {
            name: open_qa_outcome(question, evidence[name], future.result()) for name, future in futures.items()
        }

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self._questions[row]
        return {"references": list(question.answers), "prompt": self._prompts(method, question, evidence)[0]}

    def _prompts(self, method: str, question: OpenQuestion, evidence: Evidence) -> list[str]:
        def build(document: str | None) -> str:
            return open_qa_prompt(question, self._demonstrations, document, self._documents[method])

        asked = self._template.around(build)
        return [
            self._template.fit(text, asked, self._max_new_tokens, evidence.is_concatenated) for text in evidence.texts
        ]


def open_qa_prompt(
    question: OpenQuestion,
    demonstrations: Sequence[OpenQuestion],
    document: str | None = None,
    demonstration_documents: Sequence[str | None] | None = None,
) -> str:
    """Return what the LM continues until STOP. Raises what `open_qa_opening` does."""
    return open_qa_opening(demonstrations, demonstration_documents) + _block(question, document)


def open_qa_opening(demonstrations: Sequence[OpenQuestion], documents: Sequence[str | None] | None = None) -> str:
    """Return what the prompts of all questions begin with: demonstrations with their first answer.

    Raises ValueError where there are documents for the demonstrations, but not one for each.
    """
    given = [None] * len(demonstrations) if documents is None else documents
    return "".join(
        f"{_block(shot, text)} {one_line(shot.answers[0])}{BETWEEN_BLOCKS}"
        for shot, text in zip(demonstrations, given, strict=True)
    )


def _block(question: OpenQuestion, document: str | None) -> str:
    return knowledge_line(document) + question_prompt(question.example.query)


def open_qa_outcome(question: OpenQuestion, evidence: Evidence, generated: Generated) -> Outcome:
    """Return how right the first line of what the LM wrote is, and whether some document holds an answer."""
    prediction = generated.text.partition(STOP)[0].strip()
    recall = any(has_answer(document, question.answers) for document in evidence.texts if document is not None)
    numbers = {
        "exact_match": exact_match(prediction, question.answers),
        "f1": token_f1(prediction, question.answers),
        "answer_recall": float(recall),
    }
    return Outcome(numbers, {"answer": prediction, **evidence.final(generated.weights)})


def open_qa_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw questions and demonstrations, which are searched for behind them."""
    keys = config.questions
    shots = NUM_DEMONSTRATIONS if keys.shots is None else keys.shots
    pool = read_questions(str(keys.path), config.data.fields)
    if keys.demonstrations:
        questions = draw_questions(pool, keys.max_questions, config.seed)
        shown = read_questions(keys.demonstrations, config.data.fields)
        demonstrations = draw_demonstrations(shown, questions, shots, demonstration_seed(keys, config.seed))
    else:
        demonstrations, rest = hold_out_demonstrations(pool, shots, config.seed)
        questions = draw_questions(rest, keys.max_questions, config.seed)

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


EVALUATION = EvaluationKind(open_qa_dataset, question_problems)
