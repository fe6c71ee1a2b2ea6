"""The main text of a page, without its menus and footers, by trafilatura in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from replug.config.errors import RunError
from replug.web.extraction_process import READY
from replug.web.fetch_failure import FetchFailed

SECONDS = 20.0  # of the process's own time
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")  # no key is where pages are read


@dataclass(frozen=True, slots=True)
class MainText:
    """`published` is the date of its last change (ISO) that a page's markup gives, None where it gives none."""

    text: str
    title: str
    published: str | None


class Extractor:
    """Safe among threads, which wait for each other. The process starts with the first page, and `close` ends it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def extract(self, html: str) -> MainText:
        """Raises FetchFailed for a page that ends the process, that takes too long, or that has no text."""
        today = datetime.now(UTC).date().isoformat()
        with self._lock:
            process = self._started()
            line = self._exchange(process, json.dumps({"html": html, "today": today, "seconds": self._seconds}))
            if not line:
                raise FetchFailed(self._end_of(process))
        found = MainText(**json.loads(line))
        if not found.text.strip():
            raise FetchFailed("no_text")
        return found

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", "replug.web.extraction_process"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="ascii",
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline().strip() != READY:
                self._end(self._process)
                raise RunError("the process that reads pages did not start; its own error stands above")
        return self._process

    def _exchange(self, process: subprocess.Popen[str], line: str) -> str:
        """An empty line where the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _end_of(self, process: subprocess.Popen[str]) -> str:
        """The reason why a process has ended that should not."""
        code = process.wait()
        self._end(process)
        return "extraction_timeout" if code == -signal.SIGPROF else "extraction_failed"

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._process = None
