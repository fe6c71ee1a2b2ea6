"""`replug configs` and `replug keys`: the shipped configurations, and the keys of every configuration."""

from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from replug.config.errors import UserError
from replug.config.paths import SHIPPED, shipped_names
from replug.data.files import replace_file

WIDTH = 110  # characters of a configuration's description


def configs(
    file: Annotated[Path | None, typer.Argument(help="File to write. Default: NAME.yaml in this folder.")] = None,
    copy: Annotated[
        str | None,
        typer.Option(help="Name of a configuration to copy.", metavar="NAME"),
    ] = None,
) -> None:
    """List the shipped configurations, which every command takes by name; --copy writes one to edit.

    replug configs --copy own_data mine.yaml
    """
    shipped = {name: SHIPPED / f"{name}.yaml" for name in shipped_names()}
    if copy is None:
        for name, path in sorted(shipped.items(), key=lambda one: (one[0].count("/"), one[0])):
            first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            print(name.ljust(46), shorten(first, WIDTH, placeholder=" ..."))
        return
    if copy not in shipped:
        raise UserError(f"--copy: no configuration is called {copy!r}; `replug configs` lists them")
    file = file or Path(f"{Path(copy).name}.yaml")
    if file.exists():
        raise UserError(f"{file} exists; give another file, as in `replug configs --copy {copy} FILE`")
    replace_file(file, shipped[copy].read_bytes())
    print(f"{file}: now `replug train {file}` or the command that its first lines show")


def keys(section: Annotated[str, typer.Argument(help="Prefix of the keys to list, such as refresh.")] = "") -> None:
    """List every configuration key with its default and meaning; the keys of evaluations come last."""
    from replug.config.evaluation_schema import EvaluationConfig
    from replug.config.keys import key_descriptions
    from replug.config.schema import Config

    listed: dict[str, tuple[str, str]] = {}
    for key, default, meaning in [*key_descriptions(Config), *key_descriptions(EvaluationConfig)]:
        if not key.startswith("rerank_lm."):
            listed.setdefault(key, (default, meaning))
    listed["rerank_lm.*"] = ("lm.*", "Keys of a second LM that reranks answers. Default: lm reranks.")
    shown = [key for key in listed if key.startswith(section)]
    if not shown:
        raise UserError(f"no key begins with {section!r}; `replug keys` lists them all")
    for key in shown:
        default, meaning = listed[key]
        print(f"{key}={default}".ljust(44), meaning)
