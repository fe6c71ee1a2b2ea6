"""What is asked of a generation, and what comes back. Records and rules of text; no model, no torch.

The log-probs of a generation are those of the mixture of all prompts (REPLUG, section 3.2), before any temperature.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Stop = str | Sequence[str] | None  # texts, any of which ends an answer; None and an empty list end none


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How an answer is continued: greedily at temperature 0, else sampled, the same for the same seed.

    The answer ends before `stop`, a text or several, of which the first that is complete counts. `top_p` keeps the
    likeliest tokens that hold this share of the probability. `opening` changes no answer: it is what the prompts of
    many calls begin with, such as demonstrations, so that local weights read it once for all of them. Raises
    ValueError for what cannot be meant.

    >>> options = GenerationOptions(8, stop="\\n", temperature=0.7, seed=1)
    >>> StandInLM().generate_ensemble(["a boat"], [1.0], options).num_tokens
    8
    """

    max_new_tokens: int
    stop: Stop = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    opening: str = ""

    def __post_init__(self) -> None:
        whole = isinstance(self.max_new_tokens, int)
        _require(whole and self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more, a whole number")
        object.__setattr__(self, "stop", _in_one_form(self.stop))
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more, and below 2**63")


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer, and what its LM said of the `num_tokens` tokens that it chose.

    `token_logprobs` (nats, float32 [T]) and `token_entropies` (nats, float32 [T]) are of the mixture's next-token
    distribution at each token, before temperature and nucleus. The tokens that ended the answer are among them: the
    end token, or those that hold the stop. A server shows no distribution, so its answers have no entropies; where only
    whole answers of several prompts are seen there, T is 1, and `answer_tokens` says how many tokens that one log-prob
    is of. `prompt_tokens` are those of all `num_prompts` prompts together, with the opening, as the LM counted
    them; None where neither the server nor its tokenizer tells. Raises ValueError for entropies of other tokens.

    >>> answer = StandInLM().generate_ensemble(["in Basel", "in Nantes"], [0.7, 0.3], GenerationOptions(2))
    >>> answer.text, answer.num_prompts, answer.num_tokens
    ('in in', 2, 2)
    """

    text: str
    token_logprobs: np.ndarray
    token_entropies: np.ndarray | None
    num_prompts: int
    prompt_tokens: int | None
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.token_entropies is not None:
            counts = len(self.token_entropies), len(self.token_logprobs)
            _require(counts[0] == counts[1], "the number of token_entropies", counts[0], f"{counts[1]}, one a token")

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated for the answer."""
        return len(self.token_logprobs) if self.answer_tokens is None else self.answer_tokens

    @property
    def sum_logprob(self) -> float:
        return float(self.token_logprobs.sum(dtype=np.float64))

    @property
    def mean_logprob(self) -> float | None:
        """Nats a token; None where nothing was generated."""
        return self.sum_logprob / self.num_tokens if self.num_tokens else None

    @property
    def mean_entropy(self) -> float | None:
        """Nats a token; None where nothing was generated, or the LM's distributions are not seen."""
        if self.token_entropies is None or not len(self.token_entropies):
            return None
        return float(self.token_entropies.mean(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How `num_samples` answers are drawn after each prompt; at temperature 0 they are all the greedy one.

    An answer ends before `stop`, as by `GenerationOptions`. `top_p` keeps the likeliest tokens that hold this share of
    the probability. What is drawn follows from the seed, the prompt and the number of the sample. `opening` changes no
    answer: it is what the prompts of many calls begin with, so that local weights read it once. Raises ValueError for
    what cannot be meant.
    """

    num_samples: int
    max_new_tokens: int
    stop: Stop = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    opening: str = ""

    def __post_init__(self) -> None:
        _require(self.num_samples >= 1, "num_samples", self.num_samples, "1 or more")
        checked = self.of_one_answer(self.seed)  # which checks the others
        object.__setattr__(self, "stop", checked.stop)

    def of_one_answer(self, seed: int) -> GenerationOptions:
        """The options of a generation that draws one of the answers."""
        return GenerationOptions(self.max_new_tokens, self.stop, self.temperature, self.top_p, seed, self.opening)

    def draw_seed(self, prompt: str, number: int) -> int:
        """What the draws of a prompt's sample follow from: below 2**63, and another for each."""
        digest = hashlib.blake2b(f"{self.seed} {number} {prompt}".encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest()) >> 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer that was drawn, and its tokens' log-probs (nats, float32 [T]) before temperature and nucleus.

    The tokens that ended the answer are among them: the end token, or those that hold the stop.
    """

    text: str
    token_logprobs: np.ndarray

    @property
    def sum_logprob(self) -> float:
        return float(self.token_logprobs.sum(dtype=np.float64))


def stop_texts(stop: Stop) -> list[str]:
    """Each text that ends an answer."""
    return [] if not stop else [stop] if isinstance(stop, str) else list(stop)


def before_stop(text: str, stop: Stop) -> str:
    """The text before the stop that is complete first, the longest of those that end there.

    So it is the same text whether the answer is seen as a whole, token by token, or in a stream.
    """
    found = [(start + len(one), start) for one in stop_texts(stop) if (start := text.find(one)) >= 0]
    return text[: min(found)[1]] if found else text


def _in_one_form(stop: Stop) -> Stop:
    """Equal for equal meanings, since caches are asked by it: None, the one text, or a sorted tuple."""
    if stop is None or isinstance(stop, str):
        _require(stop != "", "stop", repr(stop), "a text, a list of texts, or None to stop nowhere")
        return stop
    are_texts = all(isinstance(one, str) and one for one in stop)
    _require(are_texts, "stop", repr(stop), "a text, or a list of texts of one character or more")
    several = tuple(sorted(set(stop)))
    return several if len(several) > 1 else several[0] if several else None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; expected {expected}")
