"""Open-domain question answering: exact match of a greedy short answer after demonstrations (REPLUG, section 6.3).

REPLUG asks after demonstrations with a document each, then document and question (appendix: prompts for MMLU and
open-domain QA). The LM's answer ends at the first newline and is compared with every accepted answer
(`data.answers`).

Demonstrations come first and the retrieved document after them, so the prompts of one question begin alike whatever
document they hold: a server that keeps prefixes computes the demonstrations once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from replug.answering.few_shot import FewShot, FewShotPrompts
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.answers import exact_match, has_answer, token_f1
from replug.data.rows import one_line, question_prompt
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.few_shot import dropped_shots, few_shot
from replug.evals.kinds import ANSWERS_QUESTIONS, EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes, Task
from replug.evals.questions import (
    BETWEEN_BLOCKS,
    STOP,
    OpenQuestion,
    draw_demonstrations,
    draw_questions,
    hold_out_demonstrations,
    knowledge_line,
    queries_of,
    read_questions,
)
from replug.models.black_box_lm import AsyncLM
from replug.models.generation import Generated, GenerationOptions

NUM_DEMONSTRATIONS = 16
ShotWithDocument = tuple[OpenQuestion, str | None]


class OpenQa(Task):
    """Writes one answer from all documents of a method, token by token (a server's by whole answers)."""

    metrics: Mapping[str, Metric] = {
        "exact_match": Metric("exact_match"),
        "f1": Metric("f1"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
        "shots": Metric("shots"),  # demonstrations that the LM had room for
    }

    def __init__(
        self,
        lm: AsyncLM,
        few_shot: FewShot,
        questions: Sequence[OpenQuestion],
        shots: Mapping[str, Sequence[ShotWithDocument]],
        max_new_tokens: int,
    ) -> None:
        self._lm, self._few_shot, self._questions, self._shots = lm, few_shot, questions, shots
        self._max_new_tokens = max_new_tokens
        self.examples = [question.example for question in questions]

    def compared(self, row: int) -> tuple[str, ...]:
        return self._questions[row].example.query, *self._questions[row].answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self._questions[row]
        asked = {name: self._asked(name, question, one) for name, one in evidence.items()}
        futures = {
            name: evidence[name].submit(
                self._lm, one.prompts, GenerationOptions(self._max_new_tokens, STOP, opening=one.opening)
            )
            for name, one in asked.items()
        }
        return lambda: {
            name: open_qa_outcome(question, evidence[name], future.result(), asked[name])
            for name, future in futures.items()
        }

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self._questions[row]
        return {"references": list(question.answers), "prompt": self._asked(method, question, evidence).prompts[0]}

    def _asked(self, method: str, question: OpenQuestion, evidence: Evidence) -> FewShotPrompts:
        prompt = partial(open_qa_prompt, question)
        return self._few_shot.ask(
            question.example.id, self._shots[method], open_qa_opening, prompt, evidence.texts, evidence.is_concatenated
        )


def open_qa_prompt(question: OpenQuestion, shots: Sequence[ShotWithDocument], document: str | None = None) -> str:
    """Return what the LM continues until STOP."""
    return open_qa_opening(shots) + _block(question, document)


def open_qa_opening(shots: Sequence[ShotWithDocument]) -> str:
    """Return what the prompts of questions begin with: demonstrations with their first answer."""
    return "".join(f"{_block(shot, text)} {one_line(shot.answers[0])}{BETWEEN_BLOCKS}" for shot, text in shots)


def _block(question: OpenQuestion, document: str | None) -> str:
    return knowledge_line(document) + question_prompt(question.example.query)


def open_qa_outcome(question: OpenQuestion, evidence: Evidence, generated: Generated, asked: FewShotPrompts) -> Outcome:
    """Return how right the first line of what the LM wrote is, and whether some document holds an answer."""
    prediction = generated.text.partition(STOP)[0].strip()
    recall = any(has_answer(document, question.answers) for document in evidence.texts if document is not None)
    numbers = {
        "exact_match": exact_match(prediction, question.answers),
        "f1": token_f1(prediction, question.answers),
        "answer_recall": float(recall),
        **asked.numbers,
    }
    return Outcome(numbers, {"answer": prediction, **evidence.final(generated.weights)})


def open_qa_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw questions and demonstrations, which are searched for behind them."""
    keys = config.questions
    shots = NUM_DEMONSTRATIONS if keys.shots is None else keys.shots
    pool = read_questions(str(keys.path), config.data.fields)
    if keys.demonstrations:
        questions = draw_questions(pool, keys.max_questions, config.seed)
        pool_of_shots = read_questions(keys.demonstrations, config.data.fields)
        demonstrations = draw_demonstrations(pool_of_shots, questions, shots, config.seed)
    else:
        demonstrations, rest = hold_out_demonstrations(pool, shots, config.seed)
        questions = draw_questions(rest, keys.max_questions, config.seed)

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> OpenQa:
        assert asked is not None
        places = range(len(questions), len(questions) + len(demonstrations))
        shown = keys.documents_in_shots
        by_method = {
            method.name: [
                (shot, book.nearest(method, place) if shown else None)
                for shot, place in zip(demonstrations, places, strict=True)
            ]
            for method in book.methods
        }
        return OpenQa(asked.lm, few_shot(asked, keys.max_new_tokens), questions, by_method, keys.max_new_tokens)

    asked_for = [question.example for question in [*questions, *demonstrations]]
    written_for = [example.query for example in asked_for]
    bare = [(question.example.id, open_qa_prompt(question, ())) for question in questions]
    return EvalDataset(
        queries_of(config, asked_for), make_task, written_for, bare_prompts=bare, num_after=keys.max_new_tokens
    )


EVALUATION = EvaluationKind(open_qa_dataset, ANSWERS_QUESTIONS, add_findings=dropped_shots)
