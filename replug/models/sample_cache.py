"""Answers that LMs drew, in the same file as their scores: a row holds all samples of one prompt.

One row and not one for each sample, so that a prompt's samples are all there or all drawn again: a server draws others
each time.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from replug.models.answer_table import AnswerTable, as_array, as_bytes
from replug.models.generation import Sampled, SamplingOptions
from replug.models.score_cache import Key, hashed


def sampling_key(identity: str, prompt: str, options: SamplingOptions) -> Key:
    """16 bytes that name what is asked of a model. An opening changes no answer."""
    return hashed(identity, repr(replace(options, opening="")), prompt, size=16)


class SampleCache(AnswerTable[list[Sampled]]):
    """The table `samples`: texts as a JSON list, the log-probs of all one after another, and how many each has."""

    table = "samples"
    columns = ("texts", "logprobs", "num_tokens")

    def _values(self, answer: list[Sampled]) -> tuple:
        texts = json.dumps([sample.text for sample in answer])  # which escapes what UTF-8 cannot hold
        logprobs = b"".join(as_bytes(sample.token_logprobs) for sample in answer)
        return texts, logprobs, json.dumps([len(sample.token_logprobs) for sample in answer])

    def _from_values(self, texts: str, logprobs: bytes, num_tokens: str) -> list[Sampled]:  # type: ignore[override]
        parts = _split(as_array(logprobs), json.loads(num_tokens))
        return [Sampled(text, part) for text, part in zip(json.loads(texts), parts, strict=True)]

    def _is_sound(self, answer: list[Sampled]) -> bool:
        return all(bool(np.isfinite(sample.token_logprobs).all()) for sample in answer)


def _split(numbers: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(numbers, np.cumsum(lengths)[:-1])
