"""What every key means, read from the one place where it is written: the comments of `configs.schema`."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from replug.configs import schema

FIELD = re.compile(r"^    (?P<name>\w+): [^#\n]*(?:#\s*(?P<comment>.*))?$", re.MULTILINE)


def key_descriptions(of: Any = schema.Config) -> Iterator[tuple[str, str, str]]:
    """Full path, default and description of every key of a schema, in its order."""
    for field in dataclasses.fields(of):
        if dataclasses.is_dataclass(field.type):
            for name, default, comment in _fields(field.type):
                yield f"{field.name}.{name}", default, comment
    for name, default, comment in _fields(of):
        yield name, default, comment


def _fields(section: Any) -> Iterator[tuple[str, str, str]]:
    comments = {found["name"]: found["comment"] or "" for found in FIELD.finditer(inspect.getsource(section))}
    for field in dataclasses.fields(section):
        if not dataclasses.is_dataclass(field.type):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            yield field.name, _shown(made), comments[field.name]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return "required" if value == "???" else str(getattr(value, "name", value)).replace("\n", "\\n")
