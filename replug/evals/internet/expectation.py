"""How many tokens an evaluation will read, told before it starts. Pure.

All factors are asked for, whatever rerankers read. How many different candidates a passage will have is not known: it
counts as many as are sampled, so it is an upper bound where answers are short. In classification the labels are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replug.answering.answerer import AnsweringOptions
from replug.answering.rerankers import RERANKERS
from replug.evals.internet.costs import LineTokens


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens of every prompt as it is put to the LM, and the tokens left where the LM reads each opening once."""

    put: int = 0
    read_once: int = 0

    def __add__(self, other: "ExpectedTokens") -> "ExpectedTokens":
        return ExpectedTokens(self.put + other.put, self.read_once + other.read_once)


def expected_of_passages(
    lines: LineTokens, options: AnsweringOptions, answer_tokens: int, rerankers: Sequence[str]
) -> ExpectedTokens:
    """Of one question with its passages; an answer has so many tokens."""
    by_passage = any(RERANKERS[reranker].needs_all_passages for reranker in rerankers)
    num_candidates = len(options.labels) or options.num_samples
    total = ExpectedTokens()
    for passage in lines.passages:
        asked = passage + lines.question
        if not options.labels:
            total += _shared(lines.opening, asked, [0])
        scored = num_candidates * (len(lines.passages) if by_passage else 1)
        total += _shared(lines.opening, asked, [answer_tokens] * scored)
        total += _shared(lines.opening, passage, [lines.question])
        total += _shared(lines.opening, passage, [answer_tokens] * num_candidates)
        total += _shared(lines.opening, passage, [answer_tokens + lines.question] * num_candidates)
    return total


def _shared(opening: int, prefix: int, ends: Sequence[int]) -> ExpectedTokens:
    """Expect texts of one opening and prefix; the LM reads the opening once for all questions, so it counts nothing."""
    behind = len(ends) * prefix + sum(ends)
    return ExpectedTokens(len(ends) * opening + behind, behind)
