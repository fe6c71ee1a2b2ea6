"""The command line as a user would type it: in this process where that will do, else in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
STEPS = 24
BASE = [
    "refresh.every_steps=6",
    "refresh.lag_steps=3",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=4",
    "train.pipeline_depth=2",
]


def arguments(run: Path, overrides: tuple[str, ...], command: str, config: str) -> list[str]:
    given = [*(BASE if config == "debug" else ()), *overrides]
    return [command, str(ROOT / f"configs/{config}.yaml"), f"run_dir={run}", *given]


# A process of its own -------------------------------------------------------------------------------------


def clean_environment() -> dict[str, str]:
    """Without what the tests tell Ray, but for the priority of its workers: those of other tests would starve them."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**own, "RAY_worker_niceness": "0"}


def start(run: Path, *overrides: str, command: str = "train", config: str = "debug") -> subprocess.Popen:
    """The real command line in a session of its own, on a Ray of its own."""
    return start_process(*arguments(run, overrides, command, config))


def start_process(*typed: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "replug.commands.cli", *map(str, typed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**clean_environment(), **environment},
        cwd=ROOT,
    )


def wait_for(process: subprocess.Popen, status: int = 0, seconds: float = 500) -> str:
    """What it printed until it ended with the status."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == status, output
    return output


# This process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed; `printed` is both streams in their order."""

    status: int
    output: str
    errors: str
    printed: str


def _wants_ray(command: object = None, *typed: object) -> bool:
    return command in ("train", "evaluate", "compare") or (
        command == "prepare" and bool({"--index", "--labels"} & set(typed))
    )


class CommandLine:
    """`replug(...)` as if typed; a command that wants Ray joins the cluster at `address()`."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address

    def __call__(self, *typed: object) -> Ended:
        from replug.commands.cli import main

        joined = [f"ray.address={self._address()}"] if _wants_ray(*typed) else []
        argv = ["replug", *map(str, typed), *joined]
        status: object = 0
        with mock.patch.object(sys, "argv", argv), _as_before(), _printed() as (output, errors, printed):
            try:
                main()
            except SystemExit as ended:
                status = ended.code or 0
        assert isinstance(status, int), status
        return Ended(status, output.getvalue(), errors.getvalue(), printed.getvalue())

    def finish(self, run: Path, *overrides: str, command: str = "train", config: str = "debug") -> str:
        """Train, or run another command of a run, to a good end; returns what was printed."""
        ended = self(*arguments(run, overrides, command, config))
        assert ended.status == 0, ended.printed
        return ended.printed


class _Tee(io.StringIO):
    """Writes into another stream too."""

    def __init__(self, other: io.StringIO) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        return super().write(text)


@contextlib.contextmanager
def _printed() -> Iterator[tuple[io.StringIO, io.StringIO, io.StringIO]]:
    printed = io.StringIO()
    output, errors = _Tee(printed), _Tee(printed)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield output, errors, printed


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Threads and the random state are the process's; a command sets them as if it had the process to itself."""
    import torch

    threads, environment = torch.get_num_threads(), dict(os.environ)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if "PYTHONSAFEPATH" not in environment:  # a test's own subprocesses are not the command's
            os.environ.pop("PYTHONSAFEPATH", None)
