"""Candidates: the answers that are ranked (Lazaridou et al. 2022, section 2.3).

Four are sampled for each passage, and equal ones of a passage are one. In classification the labels are every
passage's candidates. Without a choice of passages (closed book, gold evidence) fifty are sampled and the likeliest is
the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replug.answering.prompts import one_line
from replug.models.generation import Sampled


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer on one line, and the number of the passage it was sampled from; None where there was no passage."""

    text: str
    passage: int | None = None


def sampled_candidates(samples: Sequence[Sequence[Sampled]]) -> list[Candidate]:
    """Of every passage [P] its distinct answers, in the order they were drawn. Empty answers are none."""
    return [
        Candidate(text, passage)
        for passage, drawn in enumerate(samples)
        for text in dict.fromkeys(one_line(sample.text) for sample in drawn)
        if text
    ]


def label_candidates(labels: Sequence[str], num_passages: int) -> list[Candidate]:
    """Every label for every passage."""
    return [Candidate(label, passage) for passage in range(num_passages) for label in labels]


def logprobs_of_samples(samples: Sequence[Sampled]) -> dict[str, float]:
    """Each distinct answer with its largest log-probability (nats), in the order they were drawn. Empty ones are none.

    One text may have been drawn by several sequences of tokens.
    """
    logprobs: dict[str, float] = {}
    for sample in samples:
        if text := one_line(sample.text):
            logprobs[text] = max(sample.sum_logprob, logprobs.get(text, -float("inf")))
    return logprobs


def num_tokens(samples: Sequence[Sampled]) -> int:
    """Of all samples, with the tokens that ended them."""
    return sum(len(sample.token_logprobs) for sample in samples)
