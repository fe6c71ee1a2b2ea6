"""Options and results of generation, and the rule of its stops. Imports no model and no torch.

The log-probs of an answer come from the mixture of all its prompts (REPLUG, section 3.2), before any temperature.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

LEAST_TEMPERATURE = 1e-6  # logits divided by less are infinite in float32
Stop = str | Sequence[str] | None  # any of the texts ends an answer; None and an empty list end none


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of an answer: greedy at temperature 0, else sampled, the same for the same seed.

    The answer ends before `stop`, a text or several; the first complete one counts. `top_p` keeps the likeliest tokens
    that hold this share of the probability. `num_tops` is the number of likeliest first tokens in the result; caches do
    not store them. `num_samples` is the number of answers that `sample` draws after each prompt; `generate` returns
    one. `opening` does not change an answer: it is the common beginning of the prompts of many calls, such as
    demonstrations, so that local weights read it once. Raises ValueError for options out of range.

    >>> options = GenerationOptions(8, stop="\\n", temperature=0.7, seed=1)
    >>> StandInLM().generate(["a boat"], options)[0].num_tokens
    8
    """

    max_new_tokens: int
    stop: Stop = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    opening: str = ""
    num_samples: int = 1
    num_tops: int = field(default=0, repr=False)  # keys of cached answers are made of the repr

    def __post_init__(self) -> None:
        whole = isinstance(self.max_new_tokens, int)
        _require(whole and self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more, a whole number")
        object.__setattr__(self, "stop", _normalized(self.stop))
        is_usable = self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf
        _require(is_usable, "temperature", self.temperature, f"0 (greedy), or {LEAST_TEMPERATURE:g} or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more, and below 2**63")
        _require(self.num_samples >= 1, "num_samples", self.num_samples, "1 or more")

    def draws(self, prompt: str) -> list["GenerationOptions"]:
        """Return the options [num_samples] of the samples after a prompt, each with its own seed."""
        texts = [
            f"{self.seed} {number} {prompt}".encode("utf-8", "surrogatepass") for number in range(self.num_samples)
        ]
        digests = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
        return [replace(self, seed=int.from_bytes(digest) >> 1, num_samples=1) for digest in digests]  # below 2**63


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer, and the log-probs of its `num_tokens` tokens.

    `token_logprobs` (nats, float32 [T]) and `token_entropies` (nats, float32 [T]) are of the mixture's next-token
    distribution at each token, before temperature and nucleus. They include the tokens that ended the answer: the end
    token, or the tokens of the stop. A server does not show distributions, so its answers have no entropies. A server's
    answer to several prompts has T = 1: one log-prob for all of its `answer_tokens` tokens. `tops` holds the log-probs
    of the likeliest first tokens, by text. `weights` (float64 [K]) are the weights of the prompts after the last token,
    0 for a pruned prompt. `prompt_tokens` counts the tokens of all prompts, with the opening; None if neither the
    server nor its tokenizer counts them.

    >>> mixture = Mixture(["in Basel", "Basel Basel"], [0.5, 0.5], Weighting())
    >>> [answer] = StandInLM().generate([mixture], GenerationOptions(1))
    >>> answer.text, answer.num_tokens, answer.weights.round(2).tolist()
    ('Basel', 1, [0.34, 0.66])
    """

    text: str
    token_logprobs: np.ndarray
    token_entropies: np.ndarray | None = None
    weights: np.ndarray = field(default_factory=lambda: np.ones(1))
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    tops: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        return len(self.weights)

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens."""
        return len(self.token_logprobs) if self.answer_tokens is None else self.answer_tokens

    @property
    def sum_logprob(self) -> float:
        return float(self.token_logprobs.sum(dtype=np.float64))

    @property
    def mean_logprob(self) -> float | None:
        """Return nats per token; None for an answer without tokens."""
        return self.sum_logprob / self.num_tokens if self.num_tokens else None

    @property
    def mean_entropy(self) -> float | None:
        """Return nats per token; None for an answer without tokens, or an LM that does not show distributions."""
        if self.token_entropies is None or not len(self.token_entropies):
            return None
        return float(self.token_entropies.mean(dtype=np.float64))


def elected(answers: Sequence[Generated], weights: Sequence[float] | np.ndarray) -> Generated:
    """Return the answer that the answers to K prompts vote for.

    An answer has weight * exp(mean log-prob) votes, the weight alone if the LM shows no log-probs; an empty answer
    beside others has none. The votes of equal texts, without the white space round them, add up; the largest sum wins,
    on a tie the first. The result is the answer with the most votes among the answers of this text. Its `weights` [K]
    are the votes, divided by their sum, and its `prompt_tokens` counts the tokens of all prompts.
    """
    means = np.array([-np.inf if answer.mean_logprob is None else answer.mean_logprob for answer in answers])
    with np.errstate(divide="ignore"):  # a weight of 0 has no votes
        votes = np.log(weights) + means
        if np.isneginf(votes).all():
            votes = np.log(weights)
    votes = np.exp(votes - votes.max())
    sums: dict[str, float] = {}
    for answer, vote in zip(answers, votes, strict=True):
        sums[answer.text.strip()] = sums.get(answer.text.strip(), 0.0) + float(vote)
    text = max(sums, key=lambda one: sums[one])
    best = max((place for place, answer in enumerate(answers) if answer.text.strip() == text), key=votes.__getitem__)
    return replace(answers[best], weights=votes / votes.sum(), prompt_tokens=all_prompt_tokens(answers))


def all_prompt_tokens(answers: Sequence[Generated]) -> int | None:
    """Return the number of prompt tokens of all answers; None if one is unknown."""
    counts = [answer.prompt_tokens for answer in answers]
    return None if None in counts else sum(count for count in counts if count is not None)


def by_text(likeliest: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return log-probs by text; the probabilities of tokens with equal text add up."""
    tops: dict[str, float] = {}
    for text, logprob in likeliest:
        tops[text] = float(np.logaddexp(tops.get(text, -math.inf), logprob))
    return tops


def stop_texts(stop: Stop) -> list[str]:
    """Return the texts that end an answer."""
    return [] if not stop else [stop] if isinstance(stop, str) else list(stop)


def before_stop(text: str, stop: Stop) -> str:
    """Return the text before the stop that is complete first; the longest counts if several end there.

    The result is the same for a whole answer, token by token, and in a stream.
    """
    ends = [(start + len(ending), start) for ending in stop_texts(stop) if (start := text.find(ending)) >= 0]
    return text[: min(ends)[1]] if ends else text


def _normalized(stop: Stop) -> Stop:
    """Return None, a single text, or a sorted tuple: one form for equal stops, since cache keys contain it."""
    if stop is None or isinstance(stop, str):
        _require(stop != "", "stop", repr(stop), "a text, a list of texts, or None to stop nowhere")
        return stop
    are_texts = all(isinstance(ending, str) and ending for ending in stop)
    _require(are_texts, "stop", repr(stop), "a text, or a list of texts of one character or more")
    several = tuple(sorted(set(stop)))
    return several if len(several) > 1 else several[0] if several else None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; expected {expected}")
