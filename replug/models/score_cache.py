"""The file of LM scores: what was computed, and by which model.

Answers are in it too, in tables of their own (`models/answer_table.py`).

A run of the paper's size asks for 32 million pairs, of which training needs the sum and the length only: a row
without its tokens takes 45 bytes. Texts are not stored, only the hash of model, prefix and continuation.
The file is SQLite, and kill -9 loses at most the transactions under way. On a disk of this machine it has a
write-ahead log, so several processes may write. That needs memory which they share, so on a network file system it
has a rollback journal instead, and one process at a time has the file to itself.
A stored row is replaced only when its tokens join it: what one process has read, another reads too. Scores that are
not finite are never stored; whoever asked for them names the text.

Keys of one continuation begin alike, so that the rows of one query lie side by side: a training step of 64 queries
of 20 documents changes some 64 pages of the file, where random keys changed 1,280.
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.config.errors import RunError, UserError
from replug.data.files import shared_file_system
from replug.models.black_box_lm import ContinuationScore, ScoreSum

Key = bytes

# In the file's header: "RPLG", and the version of what follows.
APPLICATION_ID = 0x52504C47
FORMAT = 6
SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    id INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE, fingerprint BLOB
);
CREATE TABLE IF NOT EXISTS scores (
    key BLOB PRIMARY KEY, model INTEGER NOT NULL, sum REAL NOT NULL, num_tokens INTEGER NOT NULL,
    created INTEGER NOT NULL, logprobs BLOB
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS generations (
    key BLOB PRIMARY KEY, model INTEGER NOT NULL, created INTEGER NOT NULL,
    text BLOB NOT NULL, logprobs BLOB NOT NULL, entropies BLOB,
    num_prompts INTEGER NOT NULL, prompt_tokens INTEGER, answer_tokens INTEGER
);
CREATE TABLE IF NOT EXISTS samples (
    key BLOB PRIMARY KEY, model INTEGER NOT NULL, created INTEGER NOT NULL,
    texts TEXT NOT NULL, logprobs BLOB NOT NULL, num_tokens TEXT NOT NULL
);
"""
TABLES_OF_ANSWERS = ("generations", "samples")
# Tokens join a row that has only its sum; every other row stays as the first writer left it.
INSERT = """
INSERT INTO scores (key, model, sum, num_tokens, created, logprobs) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
    model = excluded.model, sum = excluded.sum, num_tokens = excluded.num_tokens,
    created = excluded.created, logprobs = excluded.logprobs
WHERE scores.logprobs IS NULL AND excluded.logprobs IS NOT NULL
"""
ADD_SERVED = """
INSERT INTO models (identity, fingerprint) VALUES (?, ?)
ON CONFLICT (identity) DO UPDATE SET fingerprint = excluded.fingerprint
"""
KEYS_PER_QUERY = 500
SQLITE_HEADER = b"SQLite format 3\0"  # what every file of SQLite begins with
SECONDS_TO_WAIT_FOR_WRITERS = 60.0
LOGPROBS_DTYPE = "<f4"
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

# A server's log-probs of the same text differ in their last bits from day to day; two models differ by more.
MAX_FINGERPRINT_NATS = 0.25
MEAN_FINGERPRINT_NATS = 0.03


@dataclass(frozen=True, slots=True)
class NewScore:
    """A score to be stored, with its tokens' log-probs or without."""

    key: Key
    score: ContinuationScore
    with_tokens: bool


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What the file holds of one LM: rows of scores, answers, and prompts whose samples it has.

    Times are unix seconds, None where there are none.
    """

    identity: str
    rows: int
    rows_with_tokens: int
    generations: int
    samples: int
    oldest: int | None
    newest: int | None


def pair_key(identity: str, prefix: str, continuation: str) -> Key:
    """16 bytes that name a pair scored by a model; `prefix` is all that the LM reads before the continuation.

    The first six are the same for all prefixes: they say where in the file a query's rows lie.
    """
    return hashed(identity, continuation, size=6) + hashed(identity, prefix, continuation, size=10)


def hashed(*parts: str, size: int) -> bytes:
    """So many bytes, of the parts and of where one ends."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


class ScoreCache:
    """The file at `path`, made where it is not there. Calls must not overlap: one thread, or a lock round them.

    Raises UserError for a file that is no cache of ours, and RunError where it cannot be read or written later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = _open(path)

    def close(self) -> None:
        self._database.close()

    def sums(self, keys: Sequence[Key]) -> dict[Key, ScoreSum]:
        """Sums of those keys that are stored, with tokens or without."""
        rows = self.select("SELECT key, sum, num_tokens FROM scores WHERE key IN ({})", keys)
        return {key: ScoreSum(total, num_tokens) for key, total, num_tokens in rows}

    def scores(self, keys: Sequence[Key]) -> dict[Key, ContinuationScore]:
        """Scores of those keys that are stored with their tokens."""
        rows = self.select("SELECT key, logprobs FROM scores WHERE logprobs IS NOT NULL AND key IN ({})", keys)
        return {key: ContinuationScore(np.frombuffer(logprobs, LOGPROBS_DTYPE)) for key, logprobs in rows}

    def store(self, identity: str, scores: Iterable[NewScore]) -> None:
        """Add scores of a model, in one transaction."""
        now = int(time.time())
        with self.transaction():
            model = self.model_number(identity)
            rows = []
            for new in scores:
                score, logprobs = new.score, None
                if new.with_tokens:
                    logprobs = score.token_logprobs.astype(LOGPROBS_DTYPE).tobytes()
                if score.num_tokens > 0 and np.isfinite(score.sum_logprob):
                    rows.append((new.key, model, float(score.sum_logprob), int(score.num_tokens), now, logprobs))
            self._database.executemany(INSERT, sorted(rows))  # by key: a page is filled once

    def identity_like(self, name: str, fingerprint: np.ndarray) -> str:
        """The identity of a served model: the stored one under this name whose log-probs these are, or a new one.

        `fingerprint` [N] holds log-probs (nats) of fixed texts, as the server gives them today.
        """
        if not np.isfinite(fingerprint).all():
            raise ValueError(f"the fingerprint of {name} holds log-probs that are not finite")
        now = np.ascontiguousarray(fingerprint, dtype=LOGPROBS_DTYPE)
        with self.transaction():
            rows = self._database.execute("SELECT identity, fingerprint FROM models WHERE fingerprint IS NOT NULL")
            stored = {who: np.frombuffer(blob, LOGPROBS_DTYPE) for who, blob in rows if who.rpartition("#")[0] == name}
            apart = {who: np.abs(then - now) for who, then in stored.items() if then.shape == now.shape}
            alike = {
                who: float(difference.mean())
                for who, difference in apart.items()
                if difference.max() <= MAX_FINGERPRINT_NATS and difference.mean() <= MEAN_FINGERPRINT_NATS
            }
            if alike:
                return min(alike, key=lambda who: alike[who])
            identity = f"{name}#{hashlib.blake2b(now.tobytes(), digest_size=4).hexdigest()}"
            self._database.execute(ADD_SERVED, (identity, now.tobytes()))
        return identity

    def models(self) -> list[ModelUse]:
        """Every LM that the file knows, in the order it met them."""
        with self._explained():
            known = self._database.execute("SELECT id, identity FROM models ORDER BY id").fetchall()
            return [self._use(*model) for model in known]

    def num_rows(self, table: str = "scores") -> int:
        with self._explained():
            return self._database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def num_bytes(self) -> int:
        """Size on disk, with the write-ahead log."""
        parts = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(part.stat().st_size for part in parts if part.exists())

    def damage(self) -> str | None:
        """What SQLite finds wrong with the file itself, or None."""
        try:
            found = self._database.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            return str(error)
        return None if found == "ok" else " ".join(found.split())

    def model_number(self, identity: str) -> int:
        """Return the number of a model in the file, within a transaction; a new model is added."""
        self._database.execute("INSERT INTO models (identity) VALUES (?) ON CONFLICT DO NOTHING", (identity,))
        return self._database.execute("SELECT id FROM models WHERE identity = ?", (identity,)).fetchone()[0]

    def select(self, query: str, keys: Sequence[Key]) -> Iterator[tuple]:
        """Rows of a query that ends in `key IN ({})`."""
        with self._explained():
            for start in range(0, len(keys), KEYS_PER_QUERY):
                some = keys[start : start + KEYS_PER_QUERY]
                yield from self._database.execute(query.format(",".join("?" * len(some))), some)

    def _use(self, model: int, identity: str) -> ModelUse:
        scores = "SELECT count(*), count(logprobs), min(created), max(created) FROM scores WHERE model = ?"
        answers = "SELECT count(*), min(created), max(created) FROM {} WHERE model = ?"
        rows, with_tokens, *times = self._database.execute(scores, (model,)).fetchone()
        counts = []
        for table in TABLES_OF_ANSWERS:
            number, *others = self._database.execute(answers.format(table), (model,)).fetchone()
            counts.append(number)
            times += others
        generations, samples = counts
        known = [seconds for seconds in times if seconds is not None]
        first, last = min(known, default=None), max(known, default=None)
        return ModelUse(identity, rows, with_tokens, generations, samples, first, last)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises RunError for what SQLite raises in it."""
        with self._explained(), self._database:  # which commits at the end and rolls back on an error
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(_explain(self.path, error)) from error


def _open(path: Path) -> sqlite3.Connection:
    remove = "give another file, or remove this one: its scores are computed again"
    try:
        if path.is_file():  # SQLite takes a file of a byte or two for an empty database
            with path.open("rb") as file:
                if file.read(len(SQLITE_HEADER)) not in (b"", SQLITE_HEADER):
                    raise UserError(f"{path} is damaged, or no cache of scores: file is not a database; {remove}")
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            path, timeout=SECONDS_TO_WAIT_FOR_WRITERS, isolation_level=None, check_same_thread=False
        )
        is_shared = shared_file_system(path) is not None
        if is_shared:
            # Before anything is read, so that no shared memory is used; and one process has the file from here on.
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.executescript("BEGIN EXCLUSIVE; COMMIT;")
        is_new = not _is_ours(path, database)
        _switch_journal(database, "TRUNCATE" if is_shared else "WAL")
        if is_new:  # one transaction: nobody sees half of the tables, and a second maker finds them whole
            header = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
            database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {header} COMMIT;")
        database.execute("PRAGMA synchronous=NORMAL")
    except (sqlite3.Error, OSError) as error:
        if _is_damage(error):
            raise UserError(f"{path} is damaged, or no cache of scores: {error}; {remove}") from error
        reason = _in_use(path, error) or f"{path}: the cache of scores cannot be opened: {error}; give another file"
        raise UserError(reason) from error
    return database


def _is_ours(path: Path, database: sqlite3.Connection) -> bool:
    """False for a new file; raises UserError for what may be somebody's data, before anything is written to it."""
    is_empty = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    application = database.execute("PRAGMA application_id").fetchone()[0]
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if is_empty or (application, version) == (APPLICATION_ID, FORMAT):
        return not is_empty
    found = f"format {version}" if application == APPLICATION_ID else "an older cache, or another program's file"
    raise UserError(
        f"{path} is not a cache of scores of format {FORMAT}, but {found}; give another file, or remove this one "
        "if it is a cache: its scores are computed again"
    )


def _switch_journal(database: sqlite3.Connection, mode: str) -> None:
    """The one statement for which SQLite does not wait when another process is making the same file."""
    deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_WRITERS
    while True:
        try:
            database.execute(f"PRAGMA journal_mode={mode}")
            return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _explain(path: Path, error: Exception) -> str:
    if _is_damage(error):
        return f"{path} is damaged: {error}; `replug doctor {path}` says more"
    return f"{path}: the cache of scores cannot be used: {error}; what it holds stays, run again when this is fixed"


def _in_use(path: Path, error: Exception) -> str | None:
    """What to do about a file that another process has to itself; None where that is not what is wrong."""
    kind = shared_file_system(path)
    if kind is None or not _is_busy(error):
        return None
    return (
        f"{path} lies on a network file system ({kind}), where one process at a time can use a cache of scores, and "
        "another has this one; give another file (lm.cache), or one on a disk of this machine"
    )


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _is_damage(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED
