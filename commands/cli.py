"""The command line: every file of this folder with a record `COMMAND` is a command.

A mistake of the user's is one line on standard error and exit status 2; a run that cannot go on, 1; one that was
interrupted by SIGTERM or SIGUSR1 and goes on by the same command, 75.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import typer

import replug.commands
from replug.cluster.interruption import EXIT_STATUS
from replug.commands.command import Command, Group
from replug.commands.console import log_to_stderr
from replug.configs.errors import Interrupted, RunError, UserError
from replug.configs.plain_text import plain_text


def main() -> None:
    """Entry point of the `replug` command."""
    log_to_stderr()
    try:
        command_line()()
    except (UserError, RunError) as error:
        print(f"replug: {plain_text(str(error))}", file=sys.stderr)
        sys.exit(_exit_status(error))


def command_line() -> typer.Typer:
    """All commands, in groups, the main ones first."""
    app = typer.Typer(
        help="Tune a dense retriever to a frozen language model (REPLUG LSR).",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    order = list(Group)
    for command in sorted(_commands(), key=lambda command: (order.index(command.group), command.place)):
        if isinstance(command.run, typer.Typer):
            app.add_typer(command.run, rich_help_panel=command.group.value)
        else:
            app.command(rich_help_panel=command.group.value)(command.run)
    return app


def _commands() -> Iterator[Command]:
    for file in pkgutil.iter_modules(replug.commands.__path__, f"{replug.commands.__name__}."):
        if file.name != f"{replug.commands.__name__}.cli":
            command = getattr(importlib.import_module(file.name), "COMMAND", None)
            if isinstance(command, Command):
                yield command


def _exit_status(error: UserError | RunError) -> int:
    if isinstance(error, Interrupted):
        return EXIT_STATUS
    return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    main()
