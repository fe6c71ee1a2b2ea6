"""The command line. It imports only the chosen command, which imports torch, Ray and FAISS inside its functions.

Errors are one line on standard error. Exit statuses: 2 for a mistake of the user, 1 for a run that failed or a file
that cannot be written, 75 for a run interrupted by SIGTERM, SIGUSR1 or a closed terminal (the same command resumes it),
130 for Ctrl-C.
"""

import importlib
import importlib.metadata
import io
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from replug.cluster.environment import torch_environment
from replug.cluster.interruption import exit_status
from replug.config.errors import Interrupted, RunError, UserError
from replug.config.plain_text import plain_text
from replug.data import progress
from replug.data.files import cache_dir
from replug.messages import LOGGER, StandardError

# transformers and the hub read these, here and in Ray's actors: their bars would drown our progress lines.
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
# Ray reads this at import: a call after its end would otherwise start a second cluster, open to everybody.
OWN_CLUSTER = {"RAY_ENABLE_AUTO_CONNECT": "0"}
# Every Python started here reads this: it would import modules from the working directory otherwise.
OWN_CODE = {"PYTHONSAFEPATH": "1"}

COMMANDS = {  # by group, in the order of `replug --help`
    "Train": ("train", "prepare", "slurm"),
    "Evaluate": ("evaluate", "compare", "report"),
    "Use": ("search", "ask", "export", "serve"),
    "Plan and check": ("plan", "doctor", "configs", "keys"),
}
MODULES = {"train": "run", "evaluate": "run", "search": "run", "keys": "configs"}  # others have their own


def _rewrite(line: str) -> None:
    """Overwrite the terminal's last line."""
    shown = plain_text(line)[: shutil.get_terminal_size().columns - 1]
    print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Log replug's messages to standard error; repeated calls add no second handler.

    A program that uses `replug` as a library configures the logger `replug` itself.
    """
    LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, StandardError) for handler in LOGGER.handlers):
        LOGGER.addHandler(StandardError())


def main() -> None:
    """Run the `replug` command."""
    log_to_stderr()
    if sys.stderr.isatty():
        progress.rewrite_with(_rewrite)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # prints ? for characters outside the terminal's encoding
    for name, value in {**QUIET, **OWN_CLUSTER, **OWN_CODE, **torch_environment()}.items():
        os.environ.setdefault(name, value)
    app = command_line(*sys.argv[1:2])
    try:
        with _says_when_interrupted():
            app()
    except (UserError, RunError) as error:
        progress.erase()
        print(f"replug: {plain_text(str(error))}", file=sys.stderr)
        if isinstance(error, Interrupted):
            sys.exit(exit_status(error.signal))
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        path, cache = Path(str(error.filename or "")), cache_dir()
        # creating the cache may fail at one of its parents
        is_cache = error.filename is not None and (path.is_relative_to(cache) or cache.is_relative_to(path))
        if error.filename is None or (isinstance(error, FileNotFoundError) and not is_cache):
            raise  # a mistake of ours
        fix_hint = "; set REPLUG_CACHE to a folder that can be written" if is_cache else ""
        print(f"replug: {error.filename}: {error.strerror}{fix_hint}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def _says_when_interrupted() -> Iterator[None]:
    """End a command with a message and status 130 on Ctrl-C. Training has its own handler, which saves its step."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        print("replug: interrupted by Ctrl-C; finished work is kept; run the same command again", file=sys.stderr)
        sys.exit(exit_status(number))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"replug {importlib.metadata.version('replug')}")
        raise typer.Exit


def command_line(name: str | None = None) -> typer.Typer:
    """Return the application: the command of this name, or all commands if there is none."""
    app = typer.Typer(
        help="Tune a dense retriever to a frozen language model (REPLUG LSR).",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_options)
    is_command = any(name in names for names in COMMANDS.values())
    for group, names in COMMANDS.items():
        for known in names:
            if not is_command or known == name:
                command = getattr(importlib.import_module(f"replug.commands.{MODULES.get(known, known)}"), known)
                app.command(rich_help_panel=group)(command)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Tune a dense retriever to a frozen language model (REPLUG LSR)."""


if __name__ == "__main__":
    main()
