"""A deterministic stand-in for the language model: a cache model over words, with no weights.

A word is as likely as its share among the prefix's words, mixed with a uniform model over bytes. So
documents that hold the continuation's words help, as with a real LM, and every score can be computed by hand.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from models.black_box_lm import ContinuationScore, PassCounts, check_pairs

WORD = re.compile(r"\s*\S+|\s+")
CACHE_SHARE = 0.5


class StandInLM:
    """Tokens are words with the white space before them. `delay_seconds` slows every call, for tests of timing."""

    identity = "stand_in"
    max_tokens: int | None = None

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds
        self.counts = PassCounts()

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        check_pairs(prefixes, continuations)
        time.sleep(self.delay_seconds)
        num_words = sum(len(WORD.findall(p + c)) for p, c in zip(prefixes, continuations, strict=True))
        self.counts.add(num_words, num_words)
        return [_score_one(p, c) for p, c in zip(prefixes, continuations, strict=True)]

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        """Repeats the prompt's most frequent word."""
        answers = []
        for prompt in prompts:
            words = Counter(word.strip() for word in WORD.findall(prompt))
            best = min(words, key=lambda word: (-words[word], word)) if words else ""
            text = " ".join([best] * max_new_tokens)
            answers.append(text.split(stop)[0] if stop else text)
        return answers


def _score_one(prefix: str, continuation: str) -> ContinuationScore:
    counts = Counter(word.strip() for word in WORD.findall(prefix))
    total = max(1, sum(counts.values()))
    logprobs = []
    for word in WORD.findall(continuation):
        # Added as logarithms: the power of a long word, such as a URL, is 0 as a float.
        by_bytes = math.log(1 - CACHE_SHARE) - len(word.encode()) * math.log(256)
        by_cache = math.log(CACHE_SHARE * counts[word.strip()] / total) if counts[word.strip()] else -math.inf
        logprobs.append(np.logaddexp(by_cache, by_bytes))
        counts[word.strip()] += 1
        total += 1
    return ContinuationScore(np.array(logprobs, dtype=np.float32))
