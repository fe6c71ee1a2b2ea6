"""The source of an LM: its identity, limit and tokenizer, known before it is loaded, and the methods that open it.

Local weights, servers and stand-ins have a source each, which `models/build.py` alone chooses. This module has the
sources of LMs that compute on the user's machines, on replicas of Ray or in this process: loaded weights, and an object
of the program.

Such an object is `lm.path=python:NAME`, where NAME is its class. Each scorer replica has a copy, which Ray pickles and
sends to a process of this user: no pickle is read from a file. The object is known in the block of `given_lm`, in its
thread; another process that finds the name in a run's configuration refuses it.

Most hosted models show at most the likeliest tokens of their answer. Such an LM still shows how much a document helps:

- `yes`: z = log P(yes) of one generated token, after a prompt that asks whether the document helps;
- `answer`: z is the F1 of a greedy answer from the document against the continuation.

Each is the score of one token, so labels, cache, loss and live training treat it as a log-prob.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replug.cluster.background import InlineExecutor
from replug.config.choices import Teacher
from replug.config.errors import RunError, UserError
from replug.config.schema import LMConfig
from replug.data.answers import token_f1
from replug.models.batching import tokens_per_unit, weights_of_layers
from replug.models.black_box_lm import (
    AsyncLM,
    BlackBoxLM,
    Call,
    ContinuationScore,
    GenerateCall,
    ScoreCall,
    as_mixtures,
    check_pairs,
    mapped,
)
from replug.models.generation import Generated, GenerationOptions

if TYPE_CHECKING:  # seconds to import, and the stand-in's actors do not need it
    from transformers import PreTrainedTokenizerBase


class LMSource(ABC):
    """An LM that is not opened yet."""

    mark = ""  # the end of its identity, which separates prompts of different templates
    roles: tuple[str, ...] = ()  # of the actors that a cluster must have room for: `score`, or none without Ray

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return the opened LM's identity: equal identities give equal scores."""

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """Return the opened LM's longest input in tokens. None means no limit."""

    @abstractmethod
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the LM's own tokenizer, None if unknown, without loading the LM or a request to a server."""

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:  # noqa: B027 - local weights need none
        """Connect to a server, so that its faults show before anything heavy starts; local weights load later.

        `budget_file` counts its requests, in memory by default. `cache` recognizes a model from earlier runs.
        Raises UserError, and BudgetSpent.
        """

    @abstractmethod
    def open_here(self) -> AsyncLM:
        """Open the LM in this process, without Ray."""

    def open(self, lm: LMConfig) -> AsyncLM:
        """Open the LM by its section with the layout. Sources with `roles` need a running Ray."""
        return self.open_here()


class InProcessLM(AsyncLM):
    """An `AsyncLM` round `lm`, with the same units as a pool of it on CPUs."""

    def __init__(self, lm: BlackBoxLM, unit_tokens: int | None = None, identity: str | None = None) -> None:
        self._lm = lm
        self.identity, self.max_tokens = identity or lm.identity, lm.max_tokens
        self.unit_tokens = unit_tokens or tokens_per_unit(weights_of_layers(), on_gpu=False)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        return InlineExecutor().submit(call.run, self._lm)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: no work is under way."""


class LocalSource(LMSource):
    """An `LMSource` for the LM that `load` loads. It travels to actors by pickle."""

    roles = ("score",)
    tokens_per_batch: int | None = None  # padded tokens in one pass; None for a default by hardware and size

    @property
    def num_weights(self) -> int:
        """Return the weights of the LM's layers, without loading them."""
        return weights_of_layers()

    @abstractmethod
    def load(self, spread: bool = False) -> BlackBoxLM:
        """Load the LM in this process; `spread` distributes its layers over all visible GPUs."""

    def open(self, lm: LMConfig, second: "LocalSource | None" = None) -> AsyncLM:
        """Open the LM on replicas, which also hold a `second` one (`ScorerPool.second`)."""
        from replug.cluster.places import scorer_actors  # both import Ray, which `open_here` does not need
        from replug.models.scorer_pool import ScorerPool

        replicas, gpus = scorer_actors()
        return ScorerPool(self, replicas, None, gpus, lm.timeout_seconds, second=second)

    def open_here(self) -> AsyncLM:
        return InProcessLM(self.load(), self.tokens_per_unit(on_gpu=False), self.identity)

    def tokens_per_unit(self, on_gpu: bool) -> int:
        """Return the tokens of one unit."""
        return tokens_per_unit(self.num_weights, on_gpu, self.tokens_per_batch)


PYTHON = "python"  # before the colon of `lm.path`
_given: ContextVar[BlackBoxLM | None] = ContextVar("given_lm", default=None)


@contextmanager
def given_lm(lm: BlackBoxLM | None) -> Iterator[None]:
    """Make the object the LM of `lm.path=python:NAME` within the block."""
    token = _given.set(lm)
    try:
        yield
    finally:
        _given.reset(token)


def name_of(lm: BlackBoxLM) -> str:
    """Return the name of the object in `lm.path`."""
    return f"{PYTHON}:{type(lm).__name__}"


def given(path: str) -> BlackBoxLM:
    """Return the object that `lm.path` names. Raises UserError in a process that has none."""
    lm = _given.get()
    if lm is None:
        raise UserError(
            f"lm.path is {path}, an object of the program that started this run; expected the same object as lm= in "
            "Python, or lm.path=DIR"
        )
    return lm


class GivenSource(LocalSource):
    """A given object, such as the stand-in; each replica gets a copy."""

    def __init__(self, lm: BlackBoxLM, tokens_per_batch: int | None = None) -> None:
        self.lm, self.tokens_per_batch = lm, tokens_per_batch

    @property
    def identity(self) -> str:
        return self.lm.identity + self.mark

    @property
    def max_tokens(self) -> int | None:
        return self.lm.max_tokens

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return getattr(self.lm, "tokenizer", None)

    def load(self, spread: bool = False) -> BlackBoxLM:
        return self.lm

    def open(self, lm: LMConfig, second: LocalSource | None = None) -> AsyncLM:
        try:
            return super().open(lm, second)
        except TypeError as error:
            raise UserError(
                f"lm: a {type(self.lm).__name__} cannot be sent to the scorers: {str(error).splitlines()[0]}; expected "
                "a picklable object, which opens files and connections in its first call"
            ) from error


ANSWER_TOKENS = 32
NUM_TOPS = 20  # likeliest tokens, the most that OpenAI's chat API and vLLM show
LEAST_SHARE = 1e-9  # of probability: with rounded log-probs the rest may be below 0
AROUND = " \n\t\"'*.,Ġ▁"  # the last two stand for a blank in raw tokens


class TeacherSource(LMSource):
    """An `LMSource` of an LM that scores by `lm.score`. Its identity, and so its cached scores, name the teacher."""

    def __init__(self, source: LMSource, score: Teacher) -> None:
        self._source, self._score, self.roles = source, score, source.roles

    @property
    def identity(self) -> str:
        return f"{self._source.identity} {self._score.value}"

    @property
    def max_tokens(self) -> int | None:
        """Return the longest prompt that leaves room for the answer."""
        longest = self._source.max_tokens
        return longest and longest - (1 if self._score is Teacher.yes else ANSWER_TOKENS)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return self._source.tokenizer()

    def open(self, lm: LMConfig) -> "TeacherLM":
        return TeacherLM(self._source.open(lm), self.identity, self._score)

    def open_here(self) -> "TeacherLM":
        return TeacherLM(self._source.open_here(), self.identity, self._score)


class TeacherLM(AsyncLM):
    """An `AsyncLM` that scores a continuation by the answers of `lm` to the prefix; other calls are `lm`'s."""

    def __init__(self, lm: AsyncLM, identity: str, score: Teacher) -> None:
        self.identity, self.max_tokens = identity, lm.max_tokens
        self._lm, self._score = lm, score

    def units(self, call: Call) -> list[list[int]]:
        return self._lm.units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        if not isinstance(call, ScoreCall):
            return self._lm.submit_call(call)
        check_pairs(call.prefixes, call.continuations)
        options = GenerationOptions(ANSWER_TOKENS, stop="\n")
        if self._score is Teacher.yes:
            options = GenerationOptions(1, num_tops=NUM_TOPS)
        answers = self._lm.submit_call(GenerateCall(as_mixtures(call.prefixes), options))
        return mapped(answers, partial(self._scores, call.continuations))

    def metrics(self) -> dict[str, float]:
        return self._lm.metrics()

    def close(self) -> None:
        self._lm.close()

    def _scores(self, continuations: Sequence[str], answers: Sequence[Generated]) -> list[ContinuationScore]:
        """Return z of each continuation as the score of one token."""
        is_yes = self._score is Teacher.yes
        return [
            ContinuationScore(
                np.array([yes_logprob(answer.tops) if is_yes else token_f1(answer.text, [text])], np.float32)
            )
            for answer, text in zip(answers, continuations, strict=True)
        ]


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
