"""A disk cache of scores and answers round any LM: it computes nothing twice. The file is a SQLite database.

Training needs the sum and the length of a score only: a row without its tokens takes 45 bytes. A key is a hash of all
inputs of a score or an answer. Keys of one continuation share their first bytes, so the rows of one query are
adjacent: a training step of 64 queries with 20 documents each changes some 64 pages, where random keys changed 1,280.
On a disk of this machine the file has a write-ahead log, so several processes may write. On a network file system it
has a rollback journal, and one process at a time locks the file. kill -9 loses the transactions under way. A stored row
is replaced only to add its tokens, so all processes read the same result.

A result is awaited if a call under way computes it, read from the file, or computed. The last bits of a score depend on
the other rows of its unit, so units must not depend on timing: calls reserve their keys in the order they are
submitted, and the missing rows of a call are split into units. Whole units are stored before any caller gets their
results, so after kill -9 the same units are missing. The writer thread stores each part that the LM answers.
"""

import hashlib
import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.cluster.background import attempt
from replug.config.errors import RunError, UserError
from replug.data.files import shared_file_system
from replug.models.black_box_lm import (
    AsyncLM,
    Call,
    ContinuationScore,
    ScoreCall,
    Sum,
    as_mixtures,
    gathered,
    sum_of,
)
from replug.models.generation import Generated
from replug.models.pair_tokens import ChatText

Key = bytes
Stored = ContinuationScore | Sum | Generated | list[Generated]  # a list holds the samples of one prompt

# In the file's header: "RPLG", and the version of the format.
APPLICATION_ID = 0x52504C47
FORMAT = 9
SCORE, GENERATION, SAMPLES = range(3)  # the column `kind`
# `sum` and `num_tokens` belong to a score. `content` holds the log-probs of its tokens, if they are known, or an
# answer or samples in the form of `_packed`.
SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    id INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE, fingerprint BLOB
);
CREATE TABLE IF NOT EXISTS cached (
    key BLOB PRIMARY KEY, model INTEGER NOT NULL, kind INTEGER NOT NULL, sum REAL, num_tokens INTEGER,
    created INTEGER NOT NULL, content BLOB
) WITHOUT ROWID;
"""
# Tokens join a row that has only its sum; every other row stays as the first writer left it.
INSERT = """
INSERT INTO cached (key, model, kind, sum, num_tokens, created, content) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
    model = excluded.model, sum = excluded.sum, num_tokens = excluded.num_tokens,
    created = excluded.created, content = excluded.content
WHERE cached.content IS NULL AND excluded.content IS NOT NULL
"""
ADD_SERVED = """
INSERT INTO models (identity, fingerprint) VALUES (?, ?)
ON CONFLICT (identity) DO UPDATE SET fingerprint = excluded.fingerprint
"""
KEYS_PER_QUERY = 500
SECONDS_TO_WAIT_FOR_WRITERS = 60.0
LOGPROBS_DTYPE, IDS_DTYPE = "<f4", "<i4"

# A server's log-probs of the same text differ in their last bits from day to day; two models differ by more.
MAX_FINGERPRINT_NATS = 0.25
MEAN_FINGERPRINT_NATS = 0.03


def pair_keys(identity: str, prefixes: Sequence[str], continuations: Sequence[str], read: int = 0) -> list[Key]:
    """Return a key of 16 bytes for each pair scored by a model; a prefix is the whole input before the continuation.

    The first six bytes are the same for all prefixes of a continuation: they keep a query's rows together in the file.
    The model and a query's continuation, common to many rows, are hashed once.
    """
    also = [f"read {read}"] if read else []
    begun = hashlib.blake2b(b"".join(map(_framed, [identity, *also])), digest_size=10)
    ends = {text: (hashed(identity, text, size=6), _framed(text)) for text in set(continuations)}
    keys = []
    for prefix, continuation in zip(prefixes, continuations, strict=True):
        place, end = ends[continuation]
        digest = begun.copy()
        digest.update(_framed(prefix) + end)
        keys.append(place + digest.digest())
    return keys


def call_keys(identity: str, call: Call) -> list[Key]:
    """Return a key for each row of a call, a hash of 16 bytes of all inputs of its result. Openings do not count."""
    if isinstance(call, ScoreCall):
        return pair_keys(identity, call.prefixes, call.continuations, call.read)
    options = repr(replace(call.options, opening=""))
    if call.draws:
        return [hashed(identity, "sample", options, prompt, size=16) for prompt in call.prompts]
    keys = []
    for one in as_mixtures(call.prompts):
        how = one.weighting
        numbers = [*one.weights, how.share, how.prune, *([how.read] if how.read else [])]
        weighting = np.array(numbers, dtype="<f8").tobytes().hex()
        keys.append(hashed(identity, "generate", options, weighting, *one.prompts, size=16))
    return keys


def hashed(*parts: str, size: int) -> bytes:
    """Return a hash of `size` bytes of the parts and their lengths."""
    return hashlib.blake2b(b"".join(map(_framed, parts)), digest_size=size).digest()


def _framed(part: str) -> bytes:
    encoded = part.encode() + (repr(part.cuts).encode() if isinstance(part, ChatText) else b"")
    return len(encoded).to_bytes(8, "big") + encoded


class ScoreCache:
    """The file at `path`, created if it does not exist. Calls must not overlap: one thread, or a lock round them.

    Raises UserError for a file that is not a cache of replug, and RunError if a later read or write fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = _open(path)

    def close(self) -> None:
        self._database.close()

    def sums(self, keys: Sequence[Key]) -> dict[Key, Sum]:
        """Return the sums of stored scores, with tokens or without."""
        rows = self._select("SELECT key, sum, num_tokens FROM cached WHERE key IN ({})", keys)
        return {key: (total, num_tokens) for key, total, num_tokens in rows}

    def read(self, keys: Sequence[Key]) -> dict[Key, Stored]:
        """Return stored scores with their tokens, and stored answers and samples."""
        rows = self._select(
            "SELECT key, kind, content, num_tokens FROM cached WHERE content IS NOT NULL AND key IN ({})", keys
        )
        return {key: _unpacked(*stored) for key, *stored in rows}

    def store(self, identity: str, results: Mapping[Key, Stored]) -> None:
        """Add results of a model in one transaction.

        Leaves out results with numbers that are not finite: a later call computes them again.
        """
        now = int(time.time())
        with self._transaction():
            self._database.execute("INSERT INTO models (identity) VALUES (?) ON CONFLICT DO NOTHING", (identity,))
            [model] = self._database.execute("SELECT id FROM models WHERE identity = ?", (identity,)).fetchone()
            rows: list[tuple] = []
            for key, result in results.items():
                if (row := _packed(result)) is not None:
                    kind, total, num_tokens, content = row
                    rows.append((key, model, kind, total, num_tokens, now, content))
            self._database.executemany(INSERT, sorted(rows))  # by key: a page is filled once

    def identity_like(self, name: str, fingerprint: np.ndarray) -> str:
        """Return the stored identity of a served model with this name and these log-probs, or a new one.

        `fingerprint` [N] holds log-probs (nats) of fixed texts, as the server gives them today.
        """
        now = np.ascontiguousarray(fingerprint, dtype=LOGPROBS_DTYPE)
        with self._transaction():
            rows = self._database.execute("SELECT identity, fingerprint FROM models WHERE fingerprint IS NOT NULL")
            for who, blob in rows.fetchall():
                then = np.frombuffer(blob, LOGPROBS_DTYPE)
                if who.rpartition("#")[0] == name and then.shape == now.shape:
                    apart = np.abs(then - now)
                    if apart.max() <= MAX_FINGERPRINT_NATS and apart.mean() <= MEAN_FINGERPRINT_NATS:
                        return str(who)
            identity = f"{name}#{hashlib.blake2b(now.tobytes(), digest_size=4).hexdigest()}"
            self._database.execute(ADD_SERVED, (identity, now.tobytes()))
        return identity

    def _select(self, query: str, keys: Sequence[Key]) -> Iterator[tuple]:
        """Yield the rows of a query ending in `key IN ({})`."""
        with self._explained():
            for start in range(0, len(keys), KEYS_PER_QUERY):
                part = keys[start : start + KEYS_PER_QUERY]
                yield from self._database.execute(query.format(",".join("?" * len(part))), part)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Open a transaction. Raises RunError for errors of SQLite."""
        with self._explained(), self._database:  # commits at the end and rolls back on an error
            self._database.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(
                f"{self.path}: the cache of scores cannot be used: {error}; run again when this is fixed, or remove a "
                "damaged file: its scores are computed again"
            ) from error


def _packed(result: Stored) -> tuple[int, float | None, int | None, bytes | None] | None:
    """Return a row's kind, sum, number of tokens and content; None for numbers that are not finite or no tokens.

    Answers are a line of JSON, followed by the float32 numbers of all answers.
    """
    if isinstance(result, tuple):
        return (SCORE, *result, None) if result[1] > 0 and math.isfinite(result[0]) else None
    if isinstance(result, ContinuationScore):
        total, num_tokens = result.sum_logprob, result.num_tokens
        logprobs = np.concatenate([result.token_logprobs, result.read_logprobs]).astype(LOGPROBS_DTYPE)
        content = logprobs.tobytes() + result.read_ids.astype(IDS_DTYPE).tobytes()
        return (SCORE, total, num_tokens, content) if num_tokens > 0 and np.isfinite(logprobs).all() else None
    arrays: list[np.ndarray] = [np.empty(0, LOGPROBS_DTYPE)]
    header: list[tuple] = []
    for answer in [result] if isinstance(result, Generated) else result:
        parts = [part for part in (answer.token_logprobs, answer.token_entropies) if part is not None]
        counts = answer.weights.tolist(), answer.prompt_tokens, answer.answer_tokens
        header.append((answer.text, len(parts[0]), len(parts) > 1, *counts))
        arrays += parts
    array = np.concatenate(arrays)
    if not np.isfinite(array).all():
        return None
    # JSON escapes half characters, which UTF-8 cannot hold: a server may end an answer inside a character.
    content = json.dumps(header).encode() + b"\n" + array.astype(LOGPROBS_DTYPE).tobytes()
    return GENERATION if isinstance(result, Generated) else SAMPLES, None, None, content


def _unpacked(kind: int, content: bytes, num_tokens: int | None) -> Stored:
    if kind == SCORE and num_tokens is not None:
        logprobs = np.frombuffer(content, LOGPROBS_DTYPE)
        num_read = (len(logprobs) - num_tokens) // 2
        read_ids = np.frombuffer(content, IDS_DTYPE)[num_tokens + num_read :]
        return ContinuationScore(logprobs[:num_tokens], logprobs[num_tokens : num_tokens + num_read], read_ids)
    header, _, numbers = content.partition(b"\n")
    array, start, answers = np.frombuffer(numbers, LOGPROBS_DTYPE), 0, []
    for text, length, has_entropies, weights, *counts in json.loads(header):
        logprobs, entropies = array[start : start + length], array[start + length : start + 2 * length]
        answers.append(Generated(text, logprobs, entropies if has_entropies else None, np.array(weights), *counts))
        start += length * (1 + has_entropies)
    return answers[0] if kind == GENERATION else answers


def _open(path: Path) -> sqlite3.Connection:
    kind = shared_file_system(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            path, timeout=SECONDS_TO_WAIT_FOR_WRITERS, isolation_level=None, check_same_thread=False
        )
        if kind is not None:
            # Before the first read, so that SQLite uses no shared memory; from here on one process locks the file.
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.executescript("BEGIN EXCLUSIVE; COMMIT;")
        is_new = not _is_ours(path, database)
        with suppress(sqlite3.OperationalError):  # busy: another process makes the file now, and sets its journal
            database.execute(f"PRAGMA journal_mode={'WAL' if kind is None else 'TRUNCATE'}")
        if is_new:  # one transaction: no other process sees half of the tables
            header = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
            database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {header} COMMIT;")
        database.execute("PRAGMA synchronous=NORMAL")
    except (sqlite3.Error, OSError) as error:
        where = f" on a network file system ({kind}), where one process at a time can use it," if kind else ""
        raise UserError(
            f"{path}: the cache of scores{where} cannot be opened: {error}; give another file (lm.cache)"
        ) from error
    return database


def _is_ours(path: Path, database: sqlite3.Connection) -> bool:
    """Return False for a new file. Raises UserError for other data, before anything is written to it."""
    if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return False
    [application], [version] = (
        database.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if (application, version) != (APPLICATION_ID, FORMAT):
        raise UserError(
            f"{path} is not a cache of scores of format {FORMAT}, but another program's or of another version; give "
            "another file (lm.cache)"
        )
    return True


class Reservation(Future):
    """The result or the error of each key that the LM computes for one call; done after the last of them.

    A future for each of a step's thousand keys would cost more than the rest. `num_coming` counts keys without answer.
    """

    def __init__(self, sums_only: bool, num_coming: int) -> None:
        super().__init__()
        self.sums_only, self.num_coming = sums_only, num_coming
        self.results: dict[Key, Stored | Exception] = {}


class CachingLM(AsyncLM):
    """An `AsyncLM` that asks `lm` only for results missing from the SQLite file at `path`. Closing it closes `lm`.

    `uncached` is `lm`, for callers that measure its time. `num_misses` counts the pairs and prompts since the start
    that `lm` computed, `num_hits` all others.
    """

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self.uncached = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self.num_hits = self.num_misses = 0
        self._lock = threading.Lock()  # round the reserved keys, the counts and the file
        self._file = ScoreCache(path)
        self._reserved: dict[Key, Reservation] = {}
        self._writer = ThreadPoolExecutor(1, "score-writer")

    def units(self, call: Call) -> list[list[int]]:
        return self.uncached.units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Answer from calls under way, from the cache, and from the LM, in this order.

        The future raises the error of the first row with one. Keys of calls under way are not looked up: their result
        would depend on timing. A call for sums stores no tokens, since a run of the paper's size could not keep them,
        so calls for tokens do not wait for it.
        """
        keys = call_keys(self.identity, call)
        sums_only = isinstance(call, ScoreCall) and call.sums_only
        read = self._file.sums if sums_only else self._file.read
        with self._lock:
            reserved = ((key, self._reserved[key]) for key in keys if key in self._reserved)
            under_way = {key: own for key, own in reserved if sums_only or not own.sums_only}
            known = read([key for key in dict.fromkeys(keys) if key not in under_way])
            missing: dict[Key, int] = {}
            for row, key in enumerate(keys):
                if key not in known and key not in under_way:
                    missing.setdefault(key, row)
            own = Reservation(sums_only, len(missing))
            self._reserved |= dict.fromkeys(missing, own)
            under_way |= dict.fromkeys(missing, own)
            self.num_hits, self.num_misses = self.num_hits + len(keys) - len(missing), self.num_misses + len(missing)
        if missing:
            keys_missing = list(missing)
            for rows, answer in self.uncached.submit_units(call.take(list(missing.values()))):
                answer.add_done_callback(partial(self._arrive, own, [keys_missing[row] for row in rows]))

        def answers() -> list[Any]:
            results = [known[key] if key in known else under_way[key].results[key] for key in keys]
            for result in results:
                if isinstance(result, Exception):
                    raise result
            return results

        return gathered(set(under_way.values()), answers)

    def metrics(self) -> dict[str, float]:
        """Return the LM's own metrics, and hits, misses and the share of hits since the start."""
        hits, misses = self.num_hits, self.num_misses
        counted = {"hit_share": hits / max(1, hits + misses), "hits": float(hits), "misses": float(misses)}
        return self.uncached.metrics() | counted

    def close(self) -> None:
        self.uncached.close()  # first: answers may arrive until it is closed
        self._writer.shutdown()
        with self._lock:
            self._file.close()

    def _arrive(self, reservation: Reservation, keys: list[Key], done: "Future[list[Any]]") -> None:
        with suppress(RuntimeError):  # closed: no caller waits
            self._writer.submit(self._take, reservation, keys, done)

    def _take(self, reservation: Reservation, keys: list[Key], done: "Future[list[Any]]") -> None:
        """Store the LM's results of some keys, then pass them, or an error, to the callers."""

        def stored() -> list[Stored]:
            answers = done.result()
            if len(answers) != len(keys):
                raise ValueError(f"the LM gave {len(answers)} answers to {len(keys)} inputs")
            results = list(map(sum_of, answers) if reservation.sums_only else answers)
            with self._lock:
                self._file.store(self.identity, dict(zip(keys, results, strict=True)))
            return results

        results = attempt(stored)
        with self._lock:
            for key in keys:
                if self._reserved.get(key) is reservation:  # a later call for tokens may have its own
                    del self._reserved[key]
        answers = [results] * len(keys) if isinstance(results, Exception) else results
        reservation.results |= zip(keys, answers, strict=True)
        reservation.num_coming -= len(keys)
        if not reservation.num_coming:
            reservation.set_result(None)
