"""What `replug ask` answers, with all that the answer is from: the record that table, JSON and page show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replug.answering.factors import (
    ANSWER_ALONE,
    ANSWER_GIVEN_QUESTION,
    PASSAGE,
    QUESTION_ALONE,
    QUESTION_GIVEN_ANSWER,
    Factors,
)
from replug.web.records import Passage

CLOSED_BOOK = "closed book"
TITLES = {
    ANSWER_GIVEN_QUESTION: "p(a|q,p)",
    QUESTION_GIVEN_ANSWER: "p(q|a,p)",
    ANSWER_ALONE: "p(a|p)",
    QUESTION_ALONE: "p(q|p)",
    PASSAGE: "p(p|q)",
}


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """An answer of one passage (its number, from 0), and the logarithm of each of its factors, in nats."""

    answer: str
    passage: int
    factors: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FollowedPolicy:
    """What a policy decided, and why in a line."""

    signal: str
    value: float | None
    threshold: float | str
    retrieves: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """`way` is replug, a reranker, or closed book. The weights of the passages are their `probability`.

    `sum_logprob` (nats) is of the answer of an ensemble or of a closed book; None of a reranker's, which has a score.
    `scores` are those of the distinct answers, the best first: logarithms of any scale, or closed book log-probs.
    """

    question: str
    answer: str
    way: str
    lm: str
    searched: str
    sum_logprob: float | None = None
    passages: tuple[Passage, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[ScoredCandidate, ...] = ()
    policy: FollowedPolicy | None = None

    def best_candidate(self, answer: str) -> ScoredCandidate | None:
        """The likeliest of an answer's candidates, given question and passage."""
        own = [one for one in self.candidates if one.answer == answer]
        return max(own, key=lambda one: one.factors[ANSWER_GIVEN_QUESTION], default=None)

    def passages_of(self, answer: str) -> list[int]:
        """The numbers, from 1, of the passages that gave an answer."""
        return sorted(one.passage + 1 for one in self.candidates if one.answer == answer)

    def as_json(self) -> dict[str, Any]:
        """Everything, of JSON's own types; a logarithm of nothing is null."""
        row: dict[str, Any] = {
            "question": self.question,
            "answer": self.answer,
            "way": self.way,
            "sum_logprob": self.sum_logprob,
            "lm": self.lm,
            "searched": self.searched,
            "evidence": [_evidence(passage) for passage in self.passages],
            "failures": dict(self.failures),
            "scores": [{"answer": answer, "score": _finite(score)} for answer, score in self.scores.items()],
            "candidates": [_candidate(one) for one in self.candidates],
        }
        if (followed := self.policy) is not None:
            row["policy"] = {
                "signal": followed.signal,
                "value": followed.value,
                "threshold": followed.threshold,
                "retrieves": followed.retrieves,
            }
        return row


def scored_candidates(factors: Factors) -> tuple[ScoredCandidate, ...]:
    """Every candidate with its factors, and those of its passage."""
    return tuple(
        ScoredCandidate(
            answer,
            int(passage),
            {
                ANSWER_GIVEN_QUESTION: float(factors.answer_given_question[row]),
                QUESTION_GIVEN_ANSWER: float(factors.question_given_answer[row]),
                ANSWER_ALONE: float(factors.answer_alone[row]),
                QUESTION_ALONE: float(factors.question_alone[passage]),
                PASSAGE: float(factors.passage[passage]),
            },
        )
        for row, (answer, passage) in enumerate(zip(factors.answers, factors.passages, strict=True))
    )


def best_first(scores: Mapping[str, float]) -> dict[str, float]:
    """Equal ones stay in their order, so that the first is what `rerankers.best_answer` takes."""
    return dict(sorted(scores.items(), key=lambda one: -one[1]))


def _evidence(passage: Passage) -> dict[str, Any]:
    return {
        "id": passage.doc_id,
        "title": passage.title,
        "url": passage.url,
        "fetched": passage.fetched,
        "rank": passage.rank,
        "similarity": passage.cosine,
        "weight": passage.probability,
        "text": passage.text,
    }


def _candidate(one: ScoredCandidate) -> dict[str, Any]:
    factors = {name: _finite(value) for name, value in one.factors.items()}
    return {"answer": one.answer, "passage": one.passage + 1, "factors": factors}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
