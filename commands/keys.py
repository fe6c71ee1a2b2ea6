"""`replug keys`: every key of a configuration."""

from typing import Annotated

import typer

from replug.commands.command import Command, Group


def keys(section: Annotated[str, typer.Argument(help="Only keys that begin so, such as refresh.")] = "") -> None:
    """List every key of a configuration with its default and what it means; those of evaluations at the end."""
    from replug.configs.describe import key_descriptions
    from replug.configs.schema import EvaluationConfig

    of_runs = list(key_descriptions())
    of_evaluations = [row for row in key_descriptions(EvaluationConfig) if row not in of_runs]
    for key, default, description in of_runs + of_evaluations:
        if key.startswith(section):
            print(f"{key}={default}".ljust(44), description)


COMMAND = Command(keys, Group.look, place=4)
