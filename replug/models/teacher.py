"""Score documents by the answers of an LM that gives no log-probs of its prompt (`lm.score`).

Most hosted models show at most the likeliest tokens of their answer. Such an LM still shows how much a document helps:

- `yes`: z = log P(yes) of one generated token, after a prompt that asks whether the document helps;
- `answer`: z is the mean F1 of answers from the document against the continuation.

Each is the score of one token, so labels, cache, loss and live training treat it as a log-prob.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from replug.config.choices import Teacher
from replug.config.errors import RunError
from replug.config.schema import LMConfig
from replug.data.answers import token_f1
from replug.models.black_box_lm import (
    AsyncLM,
    Call,
    ContinuationScore,
    GenerateCall,
    ScoreCall,
    as_mixtures,
    check_pairs,
    mapped,
)
from replug.models.generation import Generated, GenerationOptions
from replug.models.lm_source import LMSource

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

ANSWER_TOKENS = 32
NUM_TOPS = 20  # likeliest tokens, the most that OpenAI's chat API and vLLM show
LEAST_SHARE = 1e-9  # of probability: with rounded log-probs the rest may be below 0
AROUND = " \n\t\"'*.,Ġ▁"  # the last two stand for a blank in raw tokens


class TeacherSource(LMSource):
    """An `LMSource` of an LM that scores by `lm.score`. Its identity, and so its cached scores, name the teacher."""

    def __init__(self, source: LMSource, lm: LMConfig) -> None:
        self._source, self._score, self._samples, self.roles = source, lm.score, lm.samples, source.roles

    @property
    def identity(self) -> str:
        return f"{self._source.identity} {self._score.value}" + (f"x{self._samples}" if self._samples > 1 else "")

    @property
    def max_tokens(self) -> int | None:
        """Return the longest prompt that leaves room for the answer."""
        longest = self._source.max_tokens
        return longest and longest - (1 if self._score is Teacher.yes else ANSWER_TOKENS)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return self._source.tokenizer()

    def open(self, lm: LMConfig) -> "TeacherLM":
        return TeacherLM(self._source.open(lm), self.identity, self._score, self._samples)

    def open_here(self) -> "TeacherLM":
        return TeacherLM(self._source.open_here(), self.identity, self._score, self._samples)


class TeacherLM(AsyncLM):
    """An `AsyncLM` that scores a continuation by the answers of `lm` to the prefix; other calls are `lm`'s."""

    def __init__(self, lm: AsyncLM, identity: str, score: Teacher, samples: int = 1) -> None:
        self.identity, self.max_tokens = identity, lm.max_tokens
        self._lm, self._score = lm, score
        self._options = GenerationOptions(ANSWER_TOKENS, stop="\n")
        if score is Teacher.yes:
            self._options = GenerationOptions(1, num_tops=NUM_TOPS)
        elif samples > 1:
            self._options = GenerationOptions(ANSWER_TOKENS, stop="\n", temperature=1.0, num_samples=samples)

    def units(self, call: Call) -> list[list[int]]:
        return self._lm.units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        if not isinstance(call, ScoreCall):
            return self._lm.submit_call(call)
        check_pairs(call.prefixes, call.continuations)
        draws = self._options.num_samples > 1
        request = GenerateCall(call.prefixes if draws else as_mixtures(call.prefixes), self._options, draws)
        return mapped(self._lm.submit_call(request), partial(self._scores, call.continuations))

    def metrics(self) -> dict[str, float]:
        return self._lm.metrics()

    def close(self) -> None:
        self._lm.close()

    def _scores(
        self, continuations: Sequence[str], generated: Sequence[Generated | Sequence[Generated]]
    ) -> list[ContinuationScore]:
        """Return z of each continuation as the score of one token."""
        scores = []
        for answer, continuation in zip(generated, continuations, strict=True):
            drawn = [answer] if isinstance(answer, Generated) else answer
            f1 = [token_f1(one.text, [continuation]) for one in drawn]
            z = yes_logprob(drawn[0].tops) if self._score is Teacher.yes else np.mean(f1)
            scores.append(ContinuationScore(np.array([z], dtype=np.float32)))
        return scores


def says_yes(token: str) -> bool:
    """Return whether a token is yes, in any case and with blanks or punctuation round it."""
    return token.strip(AROUND).lower() == "yes"


def yes_logprob(tops: Mapping[str, float]) -> float:
    """Return log P(yes) from the log-probs of the likeliest tokens.

    If yes is not among them, return its upper bound: the least of them, or the remaining probability.

    >>> round(math.exp(yes_logprob({"Yes": math.log(0.6), " yes": math.log(0.1), "No": math.log(0.2)})), 6)
    0.7
    """
    if not tops:
        raise RunError("the LM shows no likeliest tokens of its answer, which lm.score=yes needs; set lm.score=answer")
    likely = [logprob for text, logprob in tops.items() if says_yes(text)]
    if likely:
        return float(np.logaddexp.reduce(likely))
    return min(math.log(max(1 - math.fsum(map(math.exp, tops.values())), LEAST_SHARE)), *tops.values())
