"""`replug configs`: list the shipped configurations, or copy one."""

from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from replug.config.errors import UserError
from replug.config.paths import SHIPPED, shipped_names
from replug.data.files import replace_file

WIDTH = 110  # characters of what a configuration is for


def configs(
    file: Annotated[Path | None, typer.Argument(help="File to write. Default: NAME.yaml in this folder.")] = None,
    copy: Annotated[
        str | None,
        typer.Option(help="Name of a configuration to copy.", metavar="NAME"),
    ] = None,
) -> None:
    """List the shipped configurations, whose names every command takes; --copy writes one to edit.

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
