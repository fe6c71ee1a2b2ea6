"""What makes a file of this folder a command: its record `COMMAND`. The command line finds them by listing the folder.

A command's file imports what is heavy (torch, Ray, FAISS) inside its functions, so that `replug --help` and a mistake
in a configuration do not wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from replug.cluster.environment import configure_ray_environment
from replug.config.load import load_config
from replug.config.paths import check_paths, find_config
from replug.config.schema import Config


class Group(Enum):
    """Of the commands in `replug --help`, in its order."""

    train = "Train"
    evaluate = "Evaluate"
    use = "Use"
    look = "Plan and check"


@dataclass(frozen=True, slots=True)
class Command:
    """`run` is typer's function, whose name is the command's, or an app of sub-commands, which says its own name.

    `place` is its place in its group.
    """

    run: Callable[..., None] | typer.Typer
    group: Group
    place: int


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="YAML file, or the name of a shipped one such as quickstart.", metavar="CONFIG", parser=find_config
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, as section.key=VALUE. `replug keys` lists all keys.", metavar="KEY=VALUE"),
]


def load_for_run(
    path: Path,
    overrides: list[str] | None,
    needs_lm: bool = True,
    needs_retriever: bool = True,
    corpus_only: bool = False,
) -> Config:
    """Load the configuration of a command that starts Ray, and check its local paths before heavy imports."""
    config = load_config(path, overrides or [], needs_lm, needs_retriever)
    check_paths(config, corpus_only)
    configure_ray_environment(config)
    return config
