"""What was measured of a question, as a row of outcomes.jsonl holds it.

Its outcomes are named by what was asked: `none` and `gold`, an answer and its costs, and `passages`: the factors of all
candidates from as many passages as any method reads. What a method answers follows from these without asking again
(`evals.internet.deciding`), so weights can be fitted when all is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from replug.answering.answerer import Answered
from replug.answering.factors import Factors
from replug.evals.answers import has_answer
from replug.evals.internet.costs import LineTokens
from replug.evals.loop import Outcome

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
    """As a row holds it; numbers survive to the last bit."""
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
    """What `passages_outcome` wrote."""
    factors = Factors(
        tuple(detail["answers"]),
        np.array(detail["from"], dtype=np.int64),
        **{name: _array(detail[name]) for name in (*OF_CANDIDATES, *OF_PASSAGES)},
        answer_by_passage=_whole(detail),
    )
    return MeasuredPassages(
        tuple(PassageRow(**row) for row in detail["passages"]),
        factors,
        detail["held_by"],
        tuple(detail["written"]),
        LineTokens(**detail["asked"]) if detail["asked"] else None,
        LineTokens(**detail["scored"]) if detail["scored"] else None,
    )


def _whole(detail: Mapping[str, Any]) -> np.ndarray | None:
    """[A, P], also where one of the two is 0."""
    if detail["answer_by_passage"] is None:
        return None
    return _array(detail["answer_by_passage"]).reshape(len(set(detail["answers"])), len(detail["passages"]))


def _listed(array: np.ndarray | None) -> list | None:
    """JSON has no infinity: null is minus infinity, the logarithm of 0."""
    if array is None:
        return None
    return [_listed(row) for row in array] if array.ndim == 2 else [None if v == -np.inf else float(v) for v in array]


def _array(values: list) -> np.ndarray:
    rows = [_array(row) if isinstance(row, list) else (-np.inf if row is None else row) for row in values]
    return np.array(rows, dtype=np.float64)
