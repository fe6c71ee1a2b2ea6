"""Answers of LMs, in the same file as their scores: what was generated once is read from here.

A row is what one call was answered with. The call's texts are not stored, only a hash of all that the answer follows
from; the answer is, since it is what is read back. Each row has a checksum of its own: a damaged text would otherwise
be an answer like any other. A stored row is never replaced: what one process has read, another reads too.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from replug.configs.errors import RunError
from replug.models.generation import Generated, GenerationOptions
from replug.models.score_cache import LOGPROBS_DTYPE, Key, ScoreCache, hashed

COLUMNS = "text, logprobs, entropies, num_prompts, prompt_tokens, answer_tokens"
INSERT = f"""
INSERT INTO generations (key, model, created, checksum, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO NOTHING
"""
SURROGATES = "surrogatepass"  # a server may end an answer in the midst of a character


def generation_key(identity: str, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions) -> Key:
    """16 bytes that name what is asked of a model: all that its answer follows from. An opening changes no answer."""
    shares = np.asarray(weights, dtype="<f8").tobytes().hex()
    return hashed(identity, repr(replace(options, opening="")), shares, *prompts, size=16)


class GenerationCache:
    """The table `generations` in the file of `scores`. Calls must not overlap, nor with those of `scores`.

    Raises RunError where the file cannot be read or written.
    """

    def __init__(self, scores: ScoreCache) -> None:
        self._file = scores

    def answers(self, keys: Sequence[Key]) -> dict[Key, Generated]:
        """Answers of those keys that are stored. Raises RunError for a row that is not what was stored."""
        rows = self._file.select(f"SELECT key, checksum, {COLUMNS} FROM generations WHERE key IN ({{}})", keys)
        return {key: self._answer(key, checksum, values) for key, checksum, *values in rows}

    def store(self, identity: str, answers: Mapping[Key, Generated], hits: int = 0, misses: int = 0) -> None:
        """Add answers of a model, and to its counts of what it was asked, in one transaction.

        Answers with numbers that are not finite are left out: whoever asked has them, and asks again.
        """
        now = int(time.time())
        with self._file.transaction() as database:
            model = self._file.count(identity, hits, misses)
            rows = [(key, _values(answer)) for key, answer in answers.items() if _is_sound(answer)]
            database.executemany(INSERT, [(key, model, now, _checksum(key, row), *row) for key, row in rows])

    def num_rows(self) -> int:
        return self._file.num_rows("generations")

    def check_rows(self) -> Iterator[tuple[Key, str | None]]:
        """Every key, with what is wrong with its row."""
        return self._file.checked_rows("generations", f"checksum, {COLUMNS}", _mistake)

    def delete_rows(self, keys: Sequence[Key]) -> None:
        self._file.delete_rows(keys, "generations")

    def _answer(self, key: Key, checksum: bytes, values: Sequence) -> Generated:
        if checksum != _checksum(key, values):
            raise RunError(f"{self._file.path}: an answer is damaged; `replug verify {self._file.path}` says more")
        text, logprobs, entropies, *counts = values
        unsure = None if entropies is None else _array(entropies)
        return Generated(text.decode(errors=SURROGATES), _array(logprobs), unsure, *counts)


def _values(answer: Generated) -> tuple:
    """As COLUMNS."""
    entropies = None if answer.token_entropies is None else _bytes(answer.token_entropies)
    counts = answer.num_prompts, answer.prompt_tokens, answer.answer_tokens
    return answer.text.encode(errors=SURROGATES), _bytes(answer.token_logprobs), entropies, *counts


def _mistake(key: Key, checksum: bytes, *values: object) -> str | None:
    return None if checksum == _checksum(key, values) else "its answer is not what was stored"


def _checksum(key: Key, values: Sequence) -> bytes:
    """Of a row with its key. SQLite keeps no types, so a damaged row may hold anything."""
    return hashlib.blake2b(repr((key, *values)).encode(), digest_size=8).digest()


def _is_sound(answer: Generated) -> bool:
    numbers = [answer.token_logprobs] + ([] if answer.token_entropies is None else [answer.token_entropies])
    return all(bool(np.isfinite(some).all()) for some in numbers)


def _bytes(numbers: np.ndarray) -> bytes:
    return numbers.astype(LOGPROBS_DTYPE).tobytes()


def _array(numbers: bytes) -> np.ndarray:
    return np.frombuffer(numbers, dtype=LOGPROBS_DTYPE)
