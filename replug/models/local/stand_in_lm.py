"""A deterministic stand-in for the language model: a cache model over words, with no weights.

A word's probability is its share of the prefix's words, mixed with a uniform model over bytes. So documents that hold
the continuation's words help, as with a real LM, and every score can be computed by hand.
As a backend it is `lm.path=stand_in`; `stand_in:0.05` sleeps 0.05 seconds in every call.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch

from replug.data.tokenizing import word_tokenizer
from replug.models.black_box_lm import (
    ContinuationScore,
    Mixture,
    Prompt,
    Watch,
    as_mixtures,
    check_pairs,
    require_texts,
)
from replug.models.ensemble import mix
from replug.models.generation import Generated, GenerationOptions, before_stop
from replug.models.local.mixtures import TokenChooser, entropy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = re.compile(r"\s*\S+|\s+")
CACHE_SHARE = 0.5


class StandInLM:
    """A `BlackBoxLM` over words with the white space before them. `delay_seconds` slows every call, for timing tests.

    >>> StandInLM().generate(["a boat and a boat and a dog"], GenerationOptions(1))[0].text
    'a'
    """

    identity = "stand_in"
    max_tokens: int | None = None

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds
        self.counts = Counter[str]()

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast  # seconds to import

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(word_tokenizer(WORD.pattern)))
        tokenizer.backend_tokenizer.post_processor = None  # no special tokens, as before wrapping
        return tokenizer

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> list[ContinuationScore]:
        check_pairs(prefixes, continuations)
        time.sleep(self.delay_seconds)
        num_words = sum(len(WORD.findall(p + c)) for p, c in zip(prefixes, continuations, strict=True))
        self.counts.update(tokens=num_words, padded_tokens=num_words)
        scores: list[ContinuationScore] = []
        for prefix, continuation in zip(prefixes, continuations, strict=True):
            before, words = WORD.findall(prefix), WORD.findall(continuation)
            cut = len(before) - max(0, min(read, len(before) - 1))
            logprobs = np.array(_word_logprobs(before[:cut], before[cut:] + words), dtype=np.float32)
            ids = [crc32(word.encode()) >> 1 for word in before[cut:]]  # below 2**31
            scores.append(ContinuationScore.of_pair(logprobs, ids, len(ids)))
        return scores

    def generate(
        self, prompts: Sequence[Prompt], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        """Choose among the words of all prompts of a mixture, by the mixture of their scores.

        Words are joined by spaces. Prompts without a word have an empty answer. Entropies are of the choice, with
        normalized probabilities. Ignores `watch`.
        """
        mixtures = as_mixtures(prompts)
        time.sleep(self.delay_seconds)
        return [self._continue(mixture, options) for mixture in mixtures]

    def sample(self, prompts: Sequence[str], options: GenerationOptions) -> list[list[Generated]]:
        """Return `num_samples` answers of `generate` to each prompt, each with separate draws."""
        require_texts(prompts, "prompts")
        time.sleep(self.delay_seconds)
        return [[self._continue(Mixture([prompt], [1.0]), own) for own in options.draws(prompt)] for prompt in prompts]

    def _continue(self, mixture: Mixture, options: GenerationOptions) -> Generated:
        prompts = [WORD.findall(prompt) for prompt in mixture.prompts]
        cuts = [len(prompt) - mixture.num_read(prompts) for prompt in prompts]
        read = np.array([_word_logprobs(one[:cut], one[cut:]) for one, cut in zip(prompts, cuts, strict=True)])
        counts = [Counter(word.strip() for word in prompt) for prompt in prompts]
        words = sorted({word for known in counts for word in known if word})
        prompt_tokens = sum(known.total() for known in counts)
        chooser, moving, answer = TokenChooser(options), mixture.moving(read), ""
        logprobs: list[float] = []
        entropies: list[float] = []
        tops: dict[str, float] = {}
        while words and len(logprobs) < options.max_new_tokens and answer == before_stop(answer, options.stop):
            totals = [max(1, known.total()) for known in counts]
            given = np.array(
                [[_word_logprob(f" {word}", *one) for word in words] for one in zip(counts, totals, strict=True)]
            )
            mixed = mix(given, moving.log_weights)  # log-probs [V] of words after a space
            if not tops:
                tops = dict(
                    sorted(zip(words, mixed.tolist(), strict=True), key=lambda top: -top[1])[: options.num_tops]
                )
            chosen = chooser.choose(torch.from_numpy(mixed))
            moving.see(given[:, chosen])
            logprobs.append(mixed[chosen])
            entropies.append(entropy(torch.from_numpy(mixed).log_softmax(-1)))
            answer = f"{answer} {words[chosen]}" if answer else words[chosen]
            for known in counts:
                known[words[chosen]] += 1
        self.counts.update(tokens=len(logprobs), padded_tokens=len(logprobs))
        token_logprobs, token_entropies = np.array([logprobs, entropies], dtype=np.float32)
        text = before_stop(answer, options.stop)
        return Generated(text, token_logprobs, token_entropies, moving.weights, prompt_tokens, tops=tops)


def _word_logprobs(before: Sequence[str], words: Sequence[str]) -> list[float]:
    """Return the log-prob of each word after `before` and the earlier words."""
    counts = Counter(word.strip() for word in before)
    total, logprobs = max(1, len(before)), []
    for word in words:
        logprobs.append(_word_logprob(word, counts, total))
        counts[word.strip()] += 1
        total += 1
    return logprobs


def _word_logprob(word: str, counts: Counter[str], total: int) -> float:
    # Added as logarithms: the power of a long word, such as a URL, is 0 as a float.
    by_bytes = math.log(1 - CACHE_SHARE) - len(word.encode()) * math.log(256)
    by_cache = math.log(CACHE_SHARE * counts[word.strip()] / total) if counts[word.strip()] else -math.inf
    return float(np.logaddexp(by_cache, by_bytes))
