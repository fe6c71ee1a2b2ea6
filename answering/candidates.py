"""Candidates: the answers that are ranked (Lazaridou et al. 2022, section 2.3).

Four are sampled for each passage, and equal ones of a passage are one. In classification the labels are every
passage's candidates. Without a choice of passages (closed book, gold evidence) fifty are sampled and the likeliest is
the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replug.models.generation import Sampled


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer, and the number of the passage that it was sampled from; None where there was no passage."""

    text: str
    passage: int | None = None


def sampled_candidates(samples: Sequence[Sequence[Sampled]]) -> list[Candidate]:
    """Of every passage [P] its distinct answers, in the order they were drawn. Empty answers are none."""
    raise NotImplementedError


def label_candidates(labels: Sequence[str], num_passages: int) -> list[Candidate]:
    """Every label for every passage."""
    return [Candidate(label, passage) for passage in range(num_passages) for label in labels]


def likeliest(samples: Sequence[Sampled]) -> Sampled | None:
    """The answer of the largest log-probability, the first of equals; None where all are empty."""
    raise NotImplementedError
