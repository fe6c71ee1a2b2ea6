"""What every key means, read from the one place where it is written: the comments of `configs.schema`."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from configs import schema

FIELD = re.compile(r"^    (?P<name>\w+): [^#\n]*(?:#\s*(?P<comment>.*))?$", re.MULTILINE)


def key_descriptions() -> Iterator[tuple[str, str, str]]:
    """Full path, default and description of every key, in the schema's order."""
    for field in dataclasses.fields(schema.Config):
        if dataclasses.is_dataclass(field.type):
            for name, default, comment in _fields(field.type):
                yield f"{field.name}.{name}", default, comment
    for name, default, comment in _fields(schema.Config):
        yield name, default, comment


def _fields(section: Any) -> Iterator[tuple[str, str, str]]:
    comments = {found["name"]: found["comment"] or "" for found in FIELD.finditer(inspect.getsource(section))}
    for field in dataclasses.fields(section):
        if field.default is not dataclasses.MISSING:
            yield field.name, _shown(field.default), comments[field.name]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return "required" if value == "???" else str(getattr(value, "name", value)).replace("\n", "\\n")
