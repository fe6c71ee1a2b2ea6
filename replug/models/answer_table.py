"""A table of answers in the file of scores: what an LM was asked once is read from here.

A row is what one prompt, or one mixture of prompts, was answered with. The texts that were asked are not stored, only
a hash of all that the answer follows from; the answer is, since it is what is read back. A stored row is never
replaced: what one process has read, another reads too.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np

from replug.models.score_cache import LOGPROBS_DTYPE, Key, ScoreCache

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

    def store(self, identity: str, answers: Mapping[Key, Answer], hits: int = 0, misses: int = 0) -> None:
        """Add answers of a model, and to its counts of what it was asked, in one transaction.

        Answers with numbers that are not finite are left out: whoever asked has them, and asks again.
        """
        now = int(time.time())
        places = ", ".join("?" * (3 + len(self.columns)))
        columns = ", ".join(("key", "model", "created", *self.columns))
        with self._file.transaction() as database:
            model = self._file.count(identity, hits, misses)
            database.executemany(
                f"INSERT INTO {self.table} ({columns}) VALUES ({places}) ON CONFLICT (key) DO NOTHING",
                [(key, model, now, *self._values(answer)) for key, answer in answers.items() if self._is_sound(answer)],
            )

    @abstractmethod
    def _values(self, answer: Answer) -> tuple:
        """As `columns`."""

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
