"""The interface of a language model: a black box that scores and continues text.

Only text crosses the border, never another tokenizer's ids. Local weights, servers and stand-ins implement
`BlackBoxLM`; the REPLUG ensemble wraps one. An `AsyncLM` takes work without waiting: the Ray pool,
the cache and a server implement its one `submit_call`.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from replug.cluster.background import attempt
from replug.config.errors import RunError, UserError
from replug.models.batching import units_of_similar_length
from replug.models.ensemble import REPLUG_WEIGHTS, MovingWeights, Weighting, common_end
from replug.models.generation import Generated, GenerationOptions, Stop, elected, stop_texts

if TYPE_CHECKING:
    from replug.data.records import Example
    from replug.models.prompt import PromptTemplate

# Called with (answer index, text so far) after each token; returns False to end the answer.
Watch = Callable[[int, str], bool]
NOTHING_READ = np.empty(0, dtype=np.float32)
WEIGHTS_TOLERANCE = 1e-5  # by which float32 weights of a few dozen prompts may miss 1

Sum = tuple[float, int]  # log-probability (nats) and number of tokens of a continuation
Part = TypeVar("Part")
Whole = TypeVar("Whole")


class UnscorableText(ValueError, RunError):
    """A text that this LM cannot score. A retry would fail again, so callers make none."""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log-probabilities (nats) of a continuation's tokens, float32 [T].

    `read_logprobs` (float32 [N]) are the log-probs of the last tokens of its prefix, with the ids `read_ids`
    (int32 [N]); empty unless `score` was called with `read`.

    >>> score = StandInLM().score(["a boat"], [" a boat"])[0]
    >>> score.num_tokens, score.sum_logprob == float(score.token_logprobs.sum())
    (2, True)
    """

    token_logprobs: np.ndarray
    read_logprobs: np.ndarray = field(default_factory=lambda: NOTHING_READ)
    read_ids: np.ndarray = field(default_factory=lambda: NOTHING_READ)

    @classmethod
    def of_pair(cls, logprobs: np.ndarray, ids: Sequence[int], num_read: int) -> "ContinuationScore":
        """Return the score of a pair from log-probs and ids of the `num_read` read tokens and the continuation."""
        return cls(logprobs[num_read:], logprobs[:num_read], np.array(ids[:num_read], dtype=np.int32))

    @property
    def sum_logprob(self) -> float:
        """Return the sum rounded to float32, so that a cache gives back the same number."""
        return float(np.float32(self.token_logprobs.sum(dtype=np.float64)))

    @property
    def num_tokens(self) -> int:
        return len(self.token_logprobs)


def common_read(scores: "Sequence[ContinuationScore]") -> np.ndarray:
    """Return log-probs [K, N] of the tokens that all prefixes end with, among the scored tokens."""
    num = common_end([score.read_ids.tolist() for score in scores], len(scores[0].read_ids))
    return np.stack([score.read_logprobs[len(score.read_logprobs) - num :] for score in scores])


def sums_of(scores: "Sequence[ContinuationScore | Sum]") -> np.ndarray:
    """Return sums of log-probs (nats) and numbers of tokens, float64 [N, 2]."""
    return np.array([sum_of(score) for score in scores], dtype=np.float64).reshape(len(scores), 2)


def sum_of(score: "ContinuationScore | Sum") -> "Sum":
    return score if isinstance(score, tuple) else (score.sum_logprob, score.num_tokens)


def pass_counts(lm: "BlackBoxLM") -> Counter[str]:
    """Return the counts that an LM keeps of its passes; a user's own LM keeps none.

    They are the `tokens` of its passes so far, the `padded_tokens`, and the passes that were `halved` for lack of
    memory.
    """
    counts: Counter[str] = getattr(lm, "counts", None) or Counter()
    return counts


class Meter:
    """Sums of the costs of calls, by name; `read` returns the sums since the last read. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._since, self._sums = threading.Lock(), time.monotonic(), Counter[str]()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._sums.update(amounts)

    def read(self, at_once: int) -> tuple[dict[str, float], Mapping[str, float]]:
        """Return rates of `tokens` and `busy_seconds`, at most `at_once` of these per second, and the sums."""
        with self._lock:
            seconds, sums = max(time.monotonic() - self._since, 1e-9), self._sums
            self._since, self._sums = time.monotonic(), Counter()
        busy_share = min(1.0, sums["busy_seconds"] / (seconds * max(1, at_once)))
        return {"tokens_per_second": sums["tokens"] / seconds, "busy_share": busy_share}, sums


@dataclass(frozen=True, slots=True)
class Mixture:
    """Prompts that differ by their document, and their initial weights: the ensemble of one question.

    `weighting` sets how the weights follow the answer, and which prompts are pruned (`models.ensemble`). Posterior
    weights are first moved by the tokens that all prompts end with, such as a question; a prompt's first token never
    counts. With `weighting.votes` the prompts' own answers vote (`answer`); an LM itself mixes. Raises ValueError
    unless the weights are a distribution.

    >>> mixture = Mixture(["in Basel", "in Nantes"], [0.7, 0.3])
    >>> StandInLM().generate([mixture], GenerationOptions(2))[0].num_prompts
    2
    """

    prompts: Sequence[str]
    weights: Sequence[float]
    weighting: Weighting = REPLUG_WEIGHTS

    def __post_init__(self) -> None:
        require_texts(self.prompts, "prompts")
        if len(self.prompts) != len(self.weights) or not self.prompts:
            raise ValueError(
                f"{len(self.prompts)} prompts but {len(self.weights)} weights; expected one weight for each prompt"
            )
        total = sum(self.weights)
        if not all(weight >= 0 for weight in self.weights) or abs(total - 1) > WEIGHTS_TOLERANCE:
            raise ValueError(f"the weights of {len(self.prompts)} prompts sum to {total:g}; expected 0 or more, sum 1")

    @property
    def log_prior(self) -> np.ndarray:
        with np.errstate(divide="ignore"):  # a weight of 0 is a log weight of minus infinity
            return np.log(np.asarray(self.weights, dtype=np.float64))

    def moving(self, read_logprobs: np.ndarray | None = None) -> MovingWeights:
        """Return the weights before the answer, moved by log-probs [K, N] of the prompts' last tokens."""
        return MovingWeights(self.log_prior, self.weighting, read_logprobs)

    def num_read(self, rows: Sequence[Sequence[Any]]) -> int:
        """Return how many last tokens of the prompts, given as tokens, move the weights."""
        moves = self.weighting.read and self.weighting.share < 1 and len(rows) > 1
        return common_end([row[1:] for row in rows], self.weighting.read) if moves else 0

    @property
    def calls(self) -> "list[Mixture]":
        """Return the prompts for the LM: the mixture, or each prompt by itself if their answers vote."""
        return as_mixtures(self.prompts) if self.weighting.votes else [self]

    def answer(self, generated: Sequence[Generated]) -> Generated:
        """Return the mixture's answer from the answers to `calls`."""
        return elected(generated, self.weights) if self.weighting.votes else generated[0]

    def submit(self, lm: "AsyncLM", options: GenerationOptions) -> "Future[list[Generated]]":
        """Return a future of the LM's answers to `calls`, which may be cancelled."""
        return lm.submit_call(GenerateCall(self.calls, options))


Prompt = str | Mixture


def as_mixtures(prompts: Sequence[Prompt]) -> list[Mixture]:
    """Return each prompt as a mixture; a text becomes a mixture of one prompt."""
    require_texts(prompts, "prompts")
    return [prompt if isinstance(prompt, Mixture) else Mixture([prompt], [1.0]) for prompt in prompts]


@runtime_checkable
class BlackBoxLM(Protocol):
    """A frozen language model. A call is whole and in order, or an error.

    >>> isinstance(StandInLM(), BlackBoxLM)
    True
    """

    @property
    def identity(self) -> str:
        """Name the model: equal identities give equal scores."""

    @property
    def max_tokens(self) -> int | None:
        """Return the longest input in tokens. None means no limit."""

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> list[ContinuationScore]:
        """Score each continuation after its prefix. The border between the two falls on a token border.

        `opening` does not change a score: it is the beginning that all prefixes of many calls share, such as
        demonstrations, so that local weights read it once for all of them. Up to `read` last tokens of each prefix are
        scored too, never its first.
        """

    def generate(
        self, prompts: Sequence[Prompt], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        """Answer each prompt, a text or a mixture; local weights decode them together.

        LMs that show growing answers call `watch`. If memory does not hold all, some begin anew, and `watch` is called
        with their first texts again.
        """

    def sample(self, prompts: Sequence[str], options: GenerationOptions) -> list[list[Generated]]:
        """Draw answers after each prompt, `[P][num_samples]`. A draw does not depend on the call's other prompts."""


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A call of `score`. With `sums_only`, `submit_call` may return a `Sum` without the log-probs of tokens."""

    prefixes: Sequence[str]
    continuations: Sequence[str]
    opening: str | None = None
    sums_only: bool = False
    read: int = 0

    def __len__(self) -> int:
        return len(self.prefixes)

    def take(self, rows: Sequence[int]) -> "ScoreCall":
        prefixes, continuations = [self.prefixes[row] for row in rows], [self.continuations[row] for row in rows]
        return replace(self, prefixes=prefixes, continuations=continuations)

    def run(self, lm: BlackBoxLM) -> list[ContinuationScore]:
        return lm.score(self.prefixes, self.continuations, opening=self.opening, **reading(self.read))


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of `generate`, or with `draws` of `sample`; its prompts are then texts, without mixtures."""

    prompts: Sequence[Any]
    options: GenerationOptions
    draws: bool = False

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Sequence[int]) -> "GenerateCall":
        return replace(self, prompts=[self.prompts[row] for row in rows])

    def run(self, lm: BlackBoxLM) -> list[Any]:
        return lm.sample(self.prompts, self.options) if self.draws else lm.generate(self.prompts, self.options)


def reading(read: int) -> dict[str, Any]:
    """Return the argument of `score`, none for 0: a user's own LM need not have it."""
    return {"read": read} if read else {}


Call = ScoreCall | GenerateCall


class AsyncLM(ABC):
    """A `BlackBoxLM` that takes work without waiting for its end. Subclasses implement `submit_call`."""

    identity: str
    max_tokens: int | None
    unit_tokens: int  # of a unit of scores

    def units(self, call: Call) -> list[list[int]]:
        """Return the rows that are best submitted together, every row once. Follows from the texts alone.

        Without some whole units the others stay the same, so a resumed run computes the missing units with the same
        rows, and to the same bits. Rows with an opening have more than the opening in common, so they are one unit.
        """
        if isinstance(call, ScoreCall) and call.opening is None:
            return units_of_similar_length(call.prefixes, call.continuations, self.unit_tokens)
        return [list(range(len(call)))]

    @abstractmethod
    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Return a future of the call's result, a row for each input in order.

        The call is computed in one piece: the unit of determinism.
        """

    def submit_units(self, call: Call) -> "list[tuple[list[int], Future[list[Any]]]]":
        """Submit the units of a call; return the rows of each unit, and a future of their results."""
        submitted = []
        for unit in self.units(call):
            answer: Future[list[Any]] | Exception = attempt(self.submit_call, call.take(unit))
            if isinstance(answer, Exception):  # refused at once
                refused, answer = answer, Future()
                answer.set_exception(refused)
            submitted.append((unit, answer))
        return submitted

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return metrics for the log, by name: counts since the start, and rates since the last call."""

    @abstractmethod
    def close(self) -> None:
        """End the work under way: waiting callers get RunError. A second call does nothing."""

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> "Future[list[ContinuationScore]]":
        """Return a future of `score`."""
        require_texts(prefixes, "prefixes")  # before they become lists
        require_texts(continuations, "continuations")
        return self.submit_call(ScoreCall(list(prefixes), list(continuations), opening, read=read))

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [N, 2]."""
        return mapped(self.submit_call(ScoreCall(prefixes, continuations, sums_only=True)), sums_of)

    def submit_examples(
        self, template: "PromptTemplate", examples: "Sequence[Example]", texts: Sequence[Sequence[str]]
    ) -> "Future[np.ndarray]":
        """Return `submit_sums` [B * K, 2] of each of B examples after each of its K texts."""
        return self.submit_sums(*template.prompts(examples, texts))

    def submit_answer(self, prompt: Prompt, options: GenerationOptions) -> "Future[Generated]":
        """Return a future of the answer to one prompt, a text or a mixture."""
        return mapped(self.submit_call(GenerateCall(as_mixtures([prompt]), options)), lambda answers: answers[0])

    def submit_samples(self, prompts: Sequence[str], options: GenerationOptions) -> "Future[list[list[Generated]]]":
        """Return a future of `sample`."""
        require_texts(prompts, "prompts")
        return self.submit_call(GenerateCall(list(prompts), options, draws=True))

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations, opening=opening, read=read).result()

    def generate(
        self, prompts: Sequence[Prompt], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        """Answer each prompt in a separate call, so that an answer does not depend on load. Ignores `watch`."""
        calls = [self.submit_call(GenerateCall([mixture], options)) for mixture in as_mixtures(prompts)]
        return [answer for call in calls for answer in call.result()]

    def sample(self, prompts: Sequence[str], options: GenerationOptions) -> list[list[Generated]]:
        return self.submit_samples(prompts, options).result()


def gathered(pending: "Iterable[Future[Any]]", result: Callable[[], Whole]) -> "Future[Whole]":
    """Return the future of `result()`, which is called once all of `pending` are done; its error is the future's."""
    left, whole = iter(pending), Future[Whole]()
    whole.set_running_or_notify_cancel()  # not to be cancelled: several callers may wait for it

    def wait_for_next(_: object = None) -> None:
        for future in left:  # a finished future would run its callback here, so the stack would grow with each one
            if not future.done():
                return future.add_done_callback(wait_for_next)
        made = attempt(result)
        return whole.set_exception(made) if isinstance(made, Exception) else whole.set_result(made)

    wait_for_next()
    return whole


def mapped(future: "Future[Part]", change: Callable[[Part], Whole]) -> "Future[Whole]":
    """Return the future of a result changed by `change`; errors and cancellation are its errors."""
    return gathered([future], lambda: change(future.result()))


def check_pairs(prefixes: Sequence[str], continuations: Sequence[str]) -> None:
    """Raise ValueError for pairs that no model could score: unequal numbers, or an empty continuation."""
    require_texts(prefixes, "prefixes")
    require_texts(continuations, "continuations")
    if len(prefixes) != len(continuations):
        raise ValueError(f"{len(prefixes)} prefixes but {len(continuations)} continuations; expected equal numbers")
    for row, continuation in enumerate(continuations):
        if not continuation:
            raise UnscorableText(f"continuation {row} is empty; expected a text to score")


def require_texts(texts: Sequence[Any], what: str) -> None:
    """Raise UserError for one text in place of a list of texts: its characters would count as texts."""
    if isinstance(texts, str | bytes):
        raise UserError(f"expected a list of {what}, found the text {texts[:40]!r}; write [text]")


class GrowingAnswer:
    """A streamed answer: a growing text, returned piece by piece.

    Both methods raise RunError if later tokens change the text of an earlier piece.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop, self._given = stop, ""

    def grow(self, whole: str) -> str:
        """Return the new settled part of the text so far; a repeated text has none.

        A character of several byte tokens, as Llama 2 writes most, unsettles the bytes before it until it is whole.
        """
        ready = settled(whole, self._stop)
        return "" if self._given.startswith(ready) else self.end(ready)

    def end(self, whole: str) -> str:
        """Return the part of the whole answer behind all earlier pieces."""
        if not whole.startswith(self._given):
            raise RunError(
                f"the answer cannot be streamed: {self._given[-40:]!r} was given out, and the tokenizer has written "
                "the text anew with later tokens; ask for the whole answer (generate) instead"
            )
        piece = whole[len(self._given) :]
        self._given += piece
        return piece


def settled(text: str, stop: Stop) -> str:
    """Return the part of an unfinished answer that no further token changes: no half character, no half stop."""
    whole = text.rstrip("\ufffd")  # it stands for the first bytes of an unfinished character
    begun = [ending[:length] for ending in stop_texts(stop) for length in range(1, len(ending))]
    return whole[: len(whole) - max((len(part) for part in begun if whole.endswith(part)), default=0)]
