"""Arguments that commands share, and how a command loads its configuration."""

from pathlib import Path
from typing import Annotated

import typer

from replug.cluster.environment import configure_ray_environment
from replug.config.load import load_config
from replug.config.paths import check_paths, find_config
from replug.config.schema import Config

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
