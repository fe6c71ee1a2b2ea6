"""The formats of sources, one module each, found by listing this folder: a new one is one file.

A module here has a `FORMAT` (`data.sources.format.Format`).
"""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path

from replug.data.sources.format import Format
from replug.data.sources.lines import COMPRESSION


@cache
def formats() -> dict[str, Format]:
    """Every format by its name."""
    found = [import_module(f"{__name__}.{module.name}").FORMAT for module in pkgutil.iter_modules(__path__)]
    return {one.name: one for one in found}


def format_of_file(path: Path) -> Format | None:
    """The format of a file by its suffix, of a compressed one by the suffix before; None where it is not known."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSION:
        suffix = Path(path.stem).suffix.lower()
    return next((one for one in formats().values() if suffix in one.suffixes), None)


def holds_rows(path: Path) -> bool:
    """Whether a file's suffix is one of a format of rows."""
    found = format_of_file(path)
    return found is not None and found.holds_rows
