"""The budget of requests to a server that may cost money, over all runs that share its file.

A request reserves its largest cost in tokens before it is sent, and is settled with its actual cost. The file is one
line of fixed width, overwritten by one system call under a file lock: kill -9 leaves the old line or the new one, and
requests in flight count in full.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock

from replug.config.errors import RunError

WIDTH = 63  # of the line, without its end: two keys and two numbers of up to 15 digits
HOW_TO_GO_ON = "raise it and run the same command again; the work so far is kept"


class BudgetSpent(RunError):
    """The next request would pass max_requests or max_tokens_sent."""


class RequestBudget:
    """Counts requests and tokens over all runs that share the budget file at `path`; None counts in memory only.

    `section` is the configuration's section with these limits.
    """

    def __init__(
        self, path: Path | None, max_requests: int | None = None, max_tokens: int | None = None, section: str = "lm"
    ) -> None:
        self._max_requests, self._max_tokens, self._section = max_requests, max_tokens, section
        self._lock = threading.Lock()
        self._path = path
        self._requests = self._tokens = self._reserved = self._in_flight = 0
        self._file_lock: AbstractContextManager = nullcontext()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._requests, self._tokens = _read(path)
            self._file_lock = FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False, thread_local=False)

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def tokens(self) -> int:
        """Tokens of the requests that have ended."""
        return self._tokens - self._reserved

    def reserve(self, tokens: int) -> bool:
        """Take one request of at most `tokens` tokens from the budget, before it is sent.

        Returns False if it may fit after others are settled: wait and call again. Raises BudgetSpent if it never will.
        """
        with self._alone():
            if self._max_requests is not None and self._requests >= self._max_requests:
                raise BudgetSpent(f"{self._section}.max_requests={self._max_requests} is spent; {HOW_TO_GO_ON}")
            if self._max_tokens is not None and self._tokens + tokens > self._max_tokens:
                if self._in_flight:
                    return False
                raise BudgetSpent(
                    f"{self._section}.max_tokens_sent={self._max_tokens} does not allow the next request: "
                    f"{self._tokens} tokens are spent and it may take {tokens}; {HOW_TO_GO_ON}"
                )
            self._count(requests=1, tokens=tokens, reserved=tokens, in_flight=1)
            return True

    def settle(self, reserved: int, actual: int) -> None:
        """End a request with `reserved` tokens and an `actual` cost in tokens."""
        with self._alone():
            self._count(requests=0, tokens=actual - reserved, reserved=-reserved, in_flight=-1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Read the current counts and lock them while the block runs."""
        with self._lock, self._file_lock:
            if self._path is not None:
                self._requests, self._tokens = _read(self._path)
            yield

    def _count(self, requests: int, tokens: int, reserved: int, in_flight: int) -> None:
        self._requests += requests
        self._tokens += tokens
        self._reserved += reserved
        self._in_flight += in_flight
        if self._path is not None:
            line = json.dumps({"requests": self._requests, "tokens": self._tokens})
            with self._path.open("r+b", buffering=0) as file:
                file.write(f"{line:<{WIDTH}}\n".encode())


def _read(path: Path) -> tuple[int, int]:
    row = json.loads(path.read_text() or '{"requests": 0, "tokens": 0}')
    return int(row["requests"]), int(row["tokens"])
