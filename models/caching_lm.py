"""A disk cache of scores round any LM: what was scored once is never scored again.

Scores do not depend on the retriever, so a sweep over retrievers reads most of them from here.
The same pair scored in another batch may differ in its last bits, so which batch computes a pair must
not depend on timing: calls claim their pairs in the order they are submitted, a pair that an earlier
call claimed is awaited and not computed again, and a call's scores are stored all together or not at all.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from models.black_box_lm import AsyncLM, ContinuationScore

Key = bytes


class CachingLM:
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold."""

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self._lm = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._lock = threading.Lock()
        self._claimed: dict[Key, Future[ContinuationScore]] = {}
        self._database = _open(path)
        self.num_hits = self.num_misses = 0

    def submit(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ContinuationScore]]":
        """Answer from the cache, from calls under way, and from the LM, in this order."""
        keys = [self._key(p, c) for p, c in zip(prefixes, continuations, strict=True)]
        with self._lock:
            answers, missing = self._claim(keys)
        if missing:
            rows = list(missing.values())
            inner = self._ask([prefixes[row] for row in rows], [continuations[row] for row in rows])
            inner.add_done_callback(lambda done: self._settle(list(missing), done))
        return gather(answers)

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)

    @property
    def hit_share(self) -> float:
        """Share of the pairs asked for since the start that did not have to be computed."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)

    def close(self) -> None:
        self._database.close()

    def _ask(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ContinuationScore]]":
        """The LM's future; an error that it raises at once is in the future too, where claims are given back."""
        try:
            return self._lm.submit(prefixes, continuations)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            failed: Future[list[ContinuationScore]] = Future()
            failed.set_exception(error)
            return failed

    def _key(self, prefix: str, continuation: str) -> Key:
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.identity, prefix, continuation):
            digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
        return digest.digest()

    def _claim(self, keys: list[Key]) -> tuple[list["Future[ContinuationScore]"], dict[Key, int]]:
        """A future for each key, and the rows of those that nobody has or is computing."""
        missing: dict[Key, int] = {}
        answers = []
        for row, key in enumerate(keys):
            future = self._claimed.get(key) or self._stored(key)
            if future is None:
                future = self._claimed[key] = Future()
                missing[key] = row
            answers.append(future)
        self.num_misses += len(missing)
        self.num_hits += len(keys) - len(missing)
        return answers, missing

    def _stored(self, key: Key) -> "Future[ContinuationScore] | None":
        row = self._database.execute("SELECT logprobs FROM scores WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        future: Future[ContinuationScore] = Future()
        future.set_result(ContinuationScore(np.frombuffer(row[0], dtype=np.float32)))
        return future

    def _settle(self, keys: list[Key], done: "Future[list[ContinuationScore]]") -> None:
        """Store a call's scores in one transaction, then hand them out; an error goes to all who wait."""
        error = done.exception()
        if error is None:
            error = self._store(keys, done.result())
        with self._lock:
            futures = [self._claimed.pop(key) for key in keys]
        for row, future in enumerate(futures):
            if error is None:
                future.set_result(done.result()[row])
            else:
                future.set_exception(error)

    def _store(self, keys: list[Key], scores: list[ContinuationScore]) -> BaseException | None:
        if len(scores) != len(keys):
            return ValueError(f"the LM gave {len(scores)} scores for {len(keys)} inputs")
        rows = [(key, s.token_logprobs.astype(np.float32).tobytes()) for key, s in zip(keys, scores, strict=True)]
        try:
            with self._lock, self._database:
                self._database.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            return error
        return None


def gather(futures: Sequence["Future[ContinuationScore]"]) -> "Future[list[ContinuationScore]]":
    """One future for all, in order; the first error in order is its error."""
    whole: Future[list[ContinuationScore]] = Future()
    left = len(futures)
    lock = threading.Lock()

    def finish_one(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result([future.result() for future in futures])

    if not futures:
        whole.set_result([])
    for future in futures:
        future.add_done_callback(finish_one)
    return whole


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, check_same_thread=False, timeout=60)
    # Write-ahead logging: several processes may write, and kill -9 loses at most the last transactions.
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, logprobs BLOB NOT NULL) WITHOUT ROWID")
    return database
