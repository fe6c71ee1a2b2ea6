"""`replug keys`: every key of a configuration."""

import difflib
from typing import Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import UserError


def keys(section: Annotated[str, typer.Argument(help="Only keys that begin so, such as refresh.")] = "") -> None:
    """List every key of a configuration with its default and what it means; those of evaluations at the end."""
    from replug.config.evaluation_schema import EvaluationConfig
    from replug.config.keys import key_descriptions
    from replug.config.load import SYNONYMS
    from replug.config.schema import Config

    of_runs = list(key_descriptions(Config))
    of_evaluations = [row for row in key_descriptions(EvaluationConfig) if row not in of_runs]
    shown = [row for row in of_runs + of_evaluations if row[0].startswith(section)]
    if not shown:
        names = [row[0] for row in of_runs]
        sections = dict.fromkeys(name.partition(".")[0] for name in names)
        close = SYNONYMS.get(section.rpartition(".")[2].lower()) or difflib.get_close_matches(
            section, [*sections, *names], n=1
        )
        meant = f"did you mean {close[0]}?" if close else "`replug keys` lists them all"
        raise UserError(f"no key begins with {section!r}; {meant}")
    for key, default, description in shown:
        print(f"{key}={default}".ljust(44), description)


COMMAND = Command(keys, Group.look, place=3)
