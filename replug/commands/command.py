"""Shared arguments of commands, and the loading of their configuration."""

from pathlib import Path
from typing import Annotated

import typer

from replug.config.load import load_config
from replug.config.paths import check_names, check_paths, find_config
from replug.config.schema import Config

ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="YAML file, or the name of a shipped one such as quickstart.",
        metavar="CONFIG",
        parser=find_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides, as section.key=VALUE. `replug keys` lists all keys.",
        metavar="KEY=VALUE",
    ),
]
# Short options for the three keys that a first run needs.
Source = Annotated[str | None, typer.Option(help="Raw texts: short for data.source=PATH.", metavar="PATH")]
Retriever = Annotated[str | None, typer.Option(help="Encoder: short for retriever.path=PATH.", metavar="PATH")]
LM = Annotated[str | None, typer.Option("--lm", help="LM: short for lm.path=PATH or lm.url=URL.", metavar="PATH")]


def with_short_keys(
    overrides: list[str] | None, source: str | None, retriever: str | None, lm: str | None
) -> list[str]:
    """Return the overrides, after the keys of the short options."""
    is_url = lm is not None and lm.startswith(("http://", "https://"))
    short = {"data.source": source, "retriever.path": retriever, "lm.url" if is_url else "lm.path": lm}
    return [*(f"{key}={value}" for key, value in short.items() if value is not None), *(overrides or [])]


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
    check_names(config)
    return config
