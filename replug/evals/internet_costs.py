"""What was measured of a question that is answered from passages, and what its answers cost.

Tokens are those of every prompt as it is put to an LM, its shots too: what a server without a cache of prefixes reads
and bills. An LM that reads a common beginning once, as local weights do, reads far less. Prompts are counted by lines.
FLOP are 2 x parameters x tokens read and written.

A row of outcomes.jsonl names its outcomes by what was asked: `none` and `gold`, an answer and its costs, and
`passages`: the factors of all candidates from as many passages as any method reads. What a method answers follows from
these without asking again (`evals.internet_deciding`), so weights can be fitted when all is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from replug.answering.answerer import Answered
from replug.answering.factors import Factors
from replug.answering.prompts import AnswerPrompts
from replug.answering.rerankers import Reranker
from replug.evals.answers import has_answer
from replug.evals.loop import Outcome

NumTokens = Callable[[str], int]
FLOP_PER_PARAMETER = 2.0


@dataclass(frozen=True, slots=True)
class AnswerCosts:
    """Of one question: tokens read and written by the LM that answers, and read by the one that reranks."""

    calls: int
    read: int
    written: int
    scored: int = 0

    def numbers(self, parameters: float | None, scorer_parameters: float | None) -> dict[str, float]:
        """By the names of metrics; FLOP where it is known how large the LMs are."""
        told = {
            "lm_calls": float(self.calls),
            "prompt_tokens": float(self.read + self.scored),
            "generated_tokens": float(self.written),
        }
        if parameters is None or scorer_parameters is None:
            return told
        by_lms = (self.read + self.written) * parameters + self.scored * scorer_parameters
        return {**told, "flop": FLOP_PER_PARAMETER * by_lms}


@dataclass(frozen=True, slots=True)
class LineTokens:
    """Tokens of the parts of a question's prompts by one tokenizer: the shots, the question, [P] passages, answers."""

    opening: int
    question: int
    passages: Sequence[int]
    answers: Mapping[str, int]

    def of_factors(self, factors: Factors, reranker: Reranker) -> tuple[int, int]:
        """How many texts are scored for a reranker, and their tokens."""
        before = [self.opening + self.passages[place] for place in range(len(factors.question_alone))]
        if reranker.needs_all_passages:
            answers = [self.answers[answer] for answer in factors.distinct]
            return len(answers) * len(before), sum(p + self.question + a for p in before for a in answers)
        calls, tokens = 0, 0
        for answer, place in zip(factors.answers, factors.passages, strict=True):
            answered = before[place] + self.answers[answer]
            of_each = [answered + self.question, answered + self.question, answered]
            used = [
                name in reranker.factors for name in ("answer_given_question", "question_given_answer", "answer_alone")
            ]
            calls += sum(used)
            tokens += sum(num for num, is_used in zip(of_each, used, strict=True) if is_used)
        if "question_alone" in reranker.factors:
            calls += len(before)
            tokens += sum(before) + self.question * len(before)
        return calls, tokens


class LineCounter:
    """Counts the lines of questions by one tokenizer."""

    def __init__(self, num_tokens: NumTokens, prompts: AnswerPrompts) -> None:
        self._num_tokens, self._prompts, self._form = num_tokens, prompts, prompts.form
        self._openings: dict[bool, int] = {}

    def lines(self, question: str, passages: Sequence[str], answers: Sequence[str]) -> LineTokens:
        return LineTokens(
            self.opening(has_evidence=True),
            self._question(question),
            [self._evidence(text) for text in passages],
            {answer: self.answer(answer) for answer in answers},
        )

    def answer(self, text: str) -> int:
        """With the end of its line."""
        return self._num_tokens(f" {text}\n")

    def opening(self, has_evidence: bool) -> int:
        """Of the shots before a question."""
        if has_evidence not in self._openings:
            self._openings[has_evidence] = self._num_tokens(self._prompts.opening(has_evidence))
        return self._openings[has_evidence]

    def alone(self, question: str, evidence: str | None) -> int:
        """Tokens of a whole prompt that asks closed book, or with one text."""
        told = 0 if evidence is None else self._evidence(evidence)
        return self.opening(evidence is not None) + told + self._question(question)

    def _question(self, text: str) -> int:
        """With the label of the answer: every prompt has both."""
        return self._num_tokens(f"{self._form.question_label}: {text}\n{self._form.answer_label}:")

    def _evidence(self, text: str) -> int:
        return self._num_tokens(f"{self._form.evidence_label}: {text}\n")


def reranked_costs(
    reranker: Reranker, factors: Factors, asked: LineTokens, scored: LineTokens, written: Sequence[int]
) -> AnswerCosts:
    """Of candidates from the passages that the factors are of, of which `written` [P] tokens were sampled; none in
    classification, where nothing is sampled. `scored` are by the tokenizer of the LM that reranks.
    """
    num_passages = len(factors.question_alone)
    calls, tokens = scored.of_factors(factors, reranker)
    if not written:
        return AnswerCosts(calls, 0, 0, tokens)
    read = sum(asked.passages[:num_passages]) + num_passages * (asked.opening + asked.question)
    return AnswerCosts(calls + num_passages, read, sum(written[:num_passages]), tokens)


PASSAGES = "passages"  # the outcome's name
OF_CANDIDATES = ("answer_given_question", "question_given_answer", "answer_alone")
OF_PASSAGES = ("question_alone", "passage")


@dataclass(frozen=True, slots=True)
class PassageRow:
    """A passage without its text, which the snapshot keeps. `holds_answer`: an accepted answer, by DPR's tokens."""

    url: str
    title: str
    fetched: str | None
    rank: int
    cosine: float
    probability: float
    doc_id: str | None
    holds_answer: bool


@dataclass(frozen=True, slots=True)
class MeasuredPassages:
    """A question's candidates with their factors, and what is known of the passages, best first.

    `held_by` says of each answer which is the first passage that holds it. `written` [P] are the tokens sampled from
    each passage; none in classification. `asked` and `scored` are by the tokenizers of the LM that answers and of the
    one that reranks, None where those are not known.
    """

    passages: tuple[PassageRow, ...]
    factors: Factors
    held_by: Mapping[str, int]
    written: tuple[int, ...]
    asked: LineTokens | None
    scored: LineTokens | None


def measured_passages(
    answered: Answered, answers: Sequence[str], asked: LineTokens | None, scored: LineTokens | None
) -> MeasuredPassages:
    """Of what was answered; `answers` are those that are accepted."""
    texts = [passage.text for passage in answered.passages]
    rows = tuple(
        PassageRow(
            one.url,
            one.title,
            one.fetched,
            one.rank,
            one.cosine,
            one.probability,
            one.doc_id,
            has_answer(one.text, answers),
        )
        for one in answered.passages
    )
    held_by = {
        answer: place
        for answer in answered.factors.distinct
        if (place := next((n for n, text in enumerate(texts) if has_answer(text, [answer])), None)) is not None
    }
    return MeasuredPassages(rows, answered.factors, held_by, answered.written_tokens, asked, scored)


def passages_outcome(measured: MeasuredPassages, failures: Mapping[str, int]) -> Outcome:
    """Return the row that holds it; numbers survive to the last bit."""
    factors = measured.factors
    arrays = {name: _listed(getattr(factors, name)) for name in (*OF_CANDIDATES, *OF_PASSAGES, "answer_by_passage")}
    detail = {
        "passages": [asdict(row) for row in measured.passages],
        "answers": list(factors.answers),
        "from": factors.passages.tolist(),
        **arrays,
        "held_by": dict(measured.held_by),
        "written": list(measured.written),
        "asked": asdict(measured.asked) if measured.asked else None,
        "scored": asdict(measured.scored) if measured.scored else None,
        "failures": dict(failures),
    }
    return Outcome({}, detail)


def read_passages(detail: Mapping[str, Any]) -> MeasuredPassages:
    """Read what `passages_outcome` wrote."""
    by_passage = None
    if detail["answer_by_passage"] is not None:  # [A, P], also where one of the two is 0
        shape = len(set(detail["answers"])), len(detail["passages"])
        by_passage = _array(detail["answer_by_passage"]).reshape(shape)
    factors = Factors(
        tuple(detail["answers"]),
        np.array(detail["from"], dtype=np.int64),
        **{name: _array(detail[name]) for name in (*OF_CANDIDATES, *OF_PASSAGES)},
        answer_by_passage=by_passage,
    )
    return MeasuredPassages(
        tuple(PassageRow(**row) for row in detail["passages"]),
        factors,
        detail["held_by"],
        tuple(detail["written"]),
        LineTokens(**detail["asked"]) if detail["asked"] else None,
        LineTokens(**detail["scored"]) if detail["scored"] else None,
    )


def _listed(array: np.ndarray | None) -> list | None:
    """JSON has no infinity: null is minus infinity, the logarithm of 0."""
    if array is None:
        return None
    return [_listed(row) for row in array] if array.ndim == 2 else [None if v == -np.inf else float(v) for v in array]


def _array(values: list) -> np.ndarray:
    rows = [_array(row) if isinstance(row, list) else (-np.inf if row is None else row) for row in values]
    return np.array(rows, dtype=np.float64)
