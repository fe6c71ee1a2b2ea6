"""What a language model is to this project: a black box that scores and continues text.

Only text crosses the border, never another tokenizer's ids. Local weights, servers and stand-ins
implement `BlackBoxLM`; the Ray pool, the cache and the REPLUG ensemble wrap one and are one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from replug.config.errors import RunError, UserError
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop, stop_texts

if TYPE_CHECKING:  # seconds to import
    from replug.models.pair_tokens import TokenizedCall


# Is told the number of an answer and its text after each of its tokens, and ends it by False.
Watch = Callable[[int, str], bool]
WEIGHTS_TOLERANCE = 1e-5  # by which float32 weights of a few dozen prompts may miss 1


class UnscorableText(ValueError, RunError):
    """A text that this LM cannot score. It would be refused again, so nobody retries."""


@dataclass(frozen=True, slots=True)
class ScoreSum:
    """What training needs of a score: the continuation's log-probability (nats) and its length in tokens."""

    sum_logprob: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log-probabilities (nats) of a continuation's tokens, float32 [T].

    >>> score = StandInLM().score(["a boat"], [" a boat"])[0]
    >>> score.num_tokens, score.sum_logprob == float(score.token_logprobs.sum())
    (2, True)
    """

    token_logprobs: np.ndarray

    @property
    def sum_logprob(self) -> float:
        """The sum rounded to float32, so that it is the same number when it comes back from a cache."""
        return float(np.float32(self.token_logprobs.sum(dtype=np.float64)))

    @property
    def num_tokens(self) -> int:
        return len(self.token_logprobs)

    def summed(self) -> ScoreSum:
        return ScoreSum(self.sum_logprob, self.num_tokens)


@dataclass(slots=True)
class PassCounts:
    """Tokens an LM's passes have held so far, without and with padding."""

    tokens: int = 0
    padded_tokens: int = 0

    def add(self, tokens: int, padded_tokens: int) -> None:
        self.tokens += tokens
        self.padded_tokens += padded_tokens


@runtime_checkable
class BlackBoxLM(Protocol):
    """A frozen language model. A call is whole and in order, or an error.

    >>> isinstance(StandInLM(), BlackBoxLM)
    True
    """

    @property
    def identity(self) -> str:
        """Which model this is: equal identities give equal scores."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Longest input in tokens, or None where there is no limit."""
        ...

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        """Score each continuation after its prefix. The border between the two falls on a token border.

        `opening` changes no score: it is what all prefixes of many calls begin with, such as demonstrations, so that
        local weights read it once for all of them, and what rows share behind it once for these.
        """
        ...

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        """Continue each prompt greedily; the answer ends before `stop`, a text or several, of which any ends it."""
        ...

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        """One answer from prompts that differ by their document, weighted by `weights`, which sum to 1."""
        ...

    def sample(self, prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        """Answers drawn after each prompt [P][num_samples]. A draw does not depend on what else is in the call."""
        ...


@runtime_checkable
class LocalLM(BlackBoxLM, Protocol):
    """A language model that computes in this process."""

    counts: PassCounts


class Pending(Protocol):
    """Scores that a device may still be computing. Any thread may wait for them."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> list[ContinuationScore]:
        """Raises what went wrong on the device."""
        ...


@runtime_checkable
class LaunchingLM(LocalLM, Protocol):
    """A local LM whose calls may be tokenized, and their scores fetched, while the device is at another call.

    `score` is one after the other. Only one thread at a time may call each of the first two.
    """

    def tokenize(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "TokenizedCall":
        """What `score` does before it needs the device."""
        ...

    def launch(self, call: "TokenizedCall") -> Pending:
        """Put a call's passes to the device. Its scores are those that `score` gives."""
        ...


@dataclass(frozen=True, slots=True)
class Mixture:
    """Prompts that differ by their document, and their weights. Raises ValueError for weights that are none."""

    prompts: Sequence[str]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        check_ensemble(self.prompts, self.weights)


@runtime_checkable
class MixingLM(BlackBoxLM, Protocol):
    """A language model that mixes the next token of prompts in this process, so that answers are seen as they grow."""

    def generate_ensembles(
        self, mixtures: Sequence[Mixture], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        """The answer of `generate_ensemble` to each mixture, decoded together; `watch` sees them grow.

        Where memory does not hold all, some begin anew, and `watch` is told their first texts again.
        """
        ...

    def stream_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Iterator[str]:
        """The text of `generate_ensemble` in pieces, as they come."""
        ...


@runtime_checkable
class AsyncLM(BlackBoxLM, Protocol):
    """A language model that takes work without waiting for its end."""

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        """Rows that are best submitted together, every row once. Follows from the texts alone.

        Taking whole units out of the texts leaves the other units as they were, so what an interrupted run
        had not finished is done again in the same company, and to the same bits.
        """
        ...

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        """As `score`, later. What is given in one call is scored together: the unit of determinism."""
        ...

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """As `generate_ensemble`, later."""
        ...

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        """As `sample`, later. What is given in one call is computed together: the unit of determinism."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is worth logging, by name: counts since the start, and rates since the last call."""
        ...

    def close(self) -> None:
        """End what is under way, which raises RunError to who waits for it. A second call does nothing."""
        ...


class WaitsForSubmitted:
    """Gives a class with the calls of an `AsyncLM` those that wait for them."""

    def score(
        self: "AsyncLM", prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations, opening=opening).result()

    def generate_ensemble(
        self: "AsyncLM", prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self.submit_ensemble(prompts, weights, options).result()

    def sample(self: "AsyncLM", prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        return self.submit_samples(prompts, options).result()


def answer_mixtures(
    lm: BlackBoxLM, mixtures: Sequence[Mixture], options: GenerationOptions, watch: Watch | None = None
) -> list[Generated]:
    """The answer to each mixture, by the quickest way that the LM has; `watch` sees those of a `MixingLM` grow."""
    if isinstance(lm, AsyncLM):
        futures = [lm.submit_ensemble(one.prompts, one.weights, options) for one in mixtures]
        return [future.result() for future in futures]
    if isinstance(lm, MixingLM):
        return lm.generate_ensembles(mixtures, options, watch)
    return [lm.generate_ensemble(one.prompts, one.weights, options) for one in mixtures]


def check_pairs(prefixes: Sequence[str], continuations: Sequence[str]) -> None:
    """Reject a call that no model could answer."""
    require_texts(prefixes, "prefixes")
    require_texts(continuations, "continuations")
    if len(prefixes) != len(continuations):
        raise ValueError(f"{len(prefixes)} prefixes but {len(continuations)} continuations")
    for row, continuation in enumerate(continuations):
        if not continuation:
            raise UnscorableText(f"continuation {row} is empty: there is nothing to score")


def check_ensemble(prompts: Sequence[str], weights: Sequence[float]) -> None:
    """Reject weights that are not one for each prompt, or no distribution, with a ValueError."""
    require_texts(prompts, "prompts")
    if len(prompts) != len(weights) or not prompts:
        raise ValueError(f"{len(prompts)} prompts but {len(weights)} weights; expected as many, and one at least")
    if not all(weight >= 0 for weight in weights) or abs(sum(weights) - 1) > WEIGHTS_TOLERANCE:
        raise ValueError(f"the weights of {len(prompts)} prompts sum to {sum(weights):g}; expected 0 or more, sum 1")


SHOWN_CHARACTERS = 40


def require_texts(texts: Sequence[str], what: str) -> None:
    """Raise UserError for one text instead of a list of them, and for what is no text in a list; `what` are plural."""
    if isinstance(texts, str | bytes):
        raise UserError(f"expected a list of {what}, found the text {_shown(texts)}; write [text]")
    if not isinstance(texts, Sequence | np.ndarray):
        raise UserError(f"expected a list of {what}, found a {type(texts).__name__}; write list(...), in an order")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{what}[{place}] is {_shown(text)}; expected a string, found {type(text).__name__}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def pieces(texts: Iterable[str], stop: Stop) -> Iterator[str]:
    """What is new in each text of a growing answer, as soon as it is settled; the last text counts whole.

    Raises RunError where a tokenizer writes what was given out in another way when more tokens come.
    """
    answer, whole = GrowingAnswer(stop), ""
    for whole in texts:
        if piece := answer.grow(whole):
            yield piece
    if piece := answer.end(whole):
        yield piece


class GrowingAnswer:
    """An answer that is given out while it grows. Both methods raise RunError where a text is written anew."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._given = stop, ""

    def grow(self, whole: str) -> str:
        """Return what is new and settled in the text so far; a text that is told again has nothing new."""
        if self._given.startswith(whole):
            return ""
        _require_longer(whole, self._given)
        return self._give(settled(whole, self._stop))

    def end(self, whole: str) -> str:
        """Return the part of the whole answer that was not given out."""
        _require_longer(whole, self._given)
        return self._give(whole)

    def _give(self, ready: str) -> str:
        piece = ready[len(self._given) :]
        self._given += piece
        return piece


def _require_longer(whole: str, given: str) -> None:
    if not whole.startswith(given):
        raise RunError(
            f"the answer cannot be streamed: {given[-40:]!r} was given out, and the tokenizer has written the text "
            "anew with later tokens; ask for the whole answer (generate, answer) instead"
        )


def settled(text: str, stop: Stop) -> str:
    """What of an unfinished answer no further token changes: no half character, and nothing that may begin a stop."""
    whole = text.rstrip("\ufffd")  # which stands for the bytes of a character that are there already
    begun = [one[:length] for one in stop_texts(stop) for length in range(1, len(one))]
    return whole[: len(whole) - max((len(part) for part in begun if whole.endswith(part)), default=0)]
