"""A table of answers in the file of scores: what an LM was asked once is read from here.

A row is what one prompt, or one mixture of prompts, was answered with. The texts that were asked are not stored, only
a hash of all that the answer follows from; the answer is, since it is what is read back. A stored row is never
replaced: what one process has read, another reads too.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import numpy as np

from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions
from replug.models.score_cache import LOGPROBS_DTYPE, Key, ScoreCache, hashed

Answer = TypeVar("Answer")


class AnswerTable(ABC, Generic[Answer]):
    """One table in the file of `scores`. Calls must not overlap, nor with those of `scores`.

    A subclass names the table and its columns, and says how an answer is laid into them. Raises RunError where the file
    cannot be read or written.
    """

    table: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __init__(self, scores: ScoreCache) -> None:
        self._file = scores

    def answers(self, keys: Sequence[Key]) -> dict[Key, Answer]:
        """Return the answers of those keys that are stored."""
        rows = self._file.select(f"SELECT key, {', '.join(self.columns)} FROM {self.table} WHERE key IN ({{}})", keys)
        return {key: self._from_values(*values) for key, *values in rows}

    def store(self, identity: str, answers: Mapping[Key, Answer]) -> None:
        """Add answers of a model, in one transaction.

        Answers with numbers that are not finite are left out: whoever asked has them, and asks again.
        """
        now = int(time.time())
        places = ", ".join("?" * (3 + len(self.columns)))
        columns = ", ".join(("key", "model", "created", *self.columns))
        with self._file.transaction() as database:
            model = self._file.model_number(identity)
            database.executemany(
                f"INSERT INTO {self.table} ({columns}) VALUES ({places}) ON CONFLICT (key) DO NOTHING",
                [(key, model, now, *self._values(answer)) for key, answer in answers.items() if self._is_sound(answer)],
            )

    @abstractmethod
    def _values(self, answer: Answer) -> tuple:
        """Return the values of `columns`."""

    @abstractmethod
    def _from_values(self, *values: object) -> Answer:
        """The answer of a row's `columns`."""

    @abstractmethod
    def _is_sound(self, answer: Answer) -> bool:
        """Whether all its numbers are finite."""


def as_bytes(numbers: np.ndarray) -> bytes:
    return numbers.astype(LOGPROBS_DTYPE).tobytes()


def as_array(numbers: bytes) -> np.ndarray:
    return np.frombuffer(numbers, dtype=LOGPROBS_DTYPE)


SURROGATES = "surrogatepass"  # a server may end an answer in the midst of a character


def generation_key(identity: str, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions) -> Key:
    """16 bytes that name what is asked of a model: all that its answer follows from. An opening changes no answer."""
    shares = np.asarray(weights, dtype="<f8").tobytes().hex()
    return hashed(identity, repr(replace(options, opening="")), shares, *prompts, size=16)


class GenerationCache(AnswerTable[Generated]):
    """The table `generations`."""

    table = "generations"
    columns = ("text", "logprobs", "entropies", "num_prompts", "prompt_tokens", "answer_tokens")

    def _values(self, answer: Generated) -> tuple:
        entropies = None if answer.token_entropies is None else as_bytes(answer.token_entropies)
        counts = answer.num_prompts, answer.prompt_tokens, answer.answer_tokens
        return answer.text.encode(errors=SURROGATES), as_bytes(answer.token_logprobs), entropies, *counts

    def _from_values(self, text: bytes, logprobs: bytes, entropies: bytes | None, *counts: int) -> Generated:  # type: ignore[override]
        unsure = None if entropies is None else as_array(entropies)
        return Generated(text.decode(errors=SURROGATES), as_array(logprobs), unsure, *counts)

    def _is_sound(self, answer: Generated) -> bool:
        numbers = [answer.token_logprobs] + ([] if answer.token_entropies is None else [answer.token_entropies])
        return all(bool(np.isfinite(some).all()) for some in numbers)


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
        parts = np.split(as_array(logprobs), np.cumsum(json.loads(num_tokens))[:-1])
        return [Sampled(text, part) for text, part in zip(json.loads(texts), parts, strict=True)]

    def _is_sound(self, answer: list[Sampled]) -> bool:
        return all(bool(np.isfinite(sample.token_logprobs).all()) for sample in answer)
