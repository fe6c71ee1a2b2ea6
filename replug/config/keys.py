"""Declare the keys of a configuration: a dataclass field holds a key's default, help, bounds and resumability.

k: int = key(20, "Number of documents per training example.", RULED)
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Bounds(Enum):
    """The numbers that a key accepts, with their names in errors."""

    positive = "a number above 0"
    not_negative = "0 or more"
    share = "a share between 0 and 1"
    below_1 = "0 or more, and below 1"
    ruled = "as config.rules says"  # checked by config.rules, with other keys or by code

    def hold(self, value: float) -> bool:
        """Return whether a number is within the bounds. NaN and infinity never are; `ruled` accepts all."""
        if self is Bounds.ruled:
            return True
        if self is Bounds.positive:
            return 0 < value < math.inf
        if self is Bounds.share:
            return 0 <= value <= 1
        return 0 <= value < (1 if self is Bounds.below_1 else math.inf)


ABOVE_0, FROM_0, SHARE, BELOW_1, RULED = Bounds  # in its order


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration. `bounds` is None if the key is not a number."""

    path: str  # such as train.lr
    kind: Any  # its type
    default: Any  # "???" if required
    meaning: str
    bounds: Bounds | None
    resumable: bool


def key(default: Any, meaning: str, bounds: Bounds | None = None, is_resumable: bool = False) -> Any:
    """Declare a key as a dataclass field."""
    metadata = {"meaning": meaning, "bounds": bounds, "resumable": is_resumable}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def resumable(default: Any, meaning: str, bounds: Bounds | None = None) -> Any:
    """Declare a key that a resumed run may change: it changes neither results nor their order."""
    return key(default, meaning, bounds, is_resumable=True)


def section(kind: type, **defaults: Any) -> Any:
    """Declare a section of keys as a dataclass field."""
    return dataclasses.field(default_factory=lambda: kind(**defaults))


def keys_of(schema: type) -> Iterator[Key]:
    """Yield every key of a schema in order: the keys of its sections, then its own."""
    for name, kind in sections_of(schema):
        yield from _keys(kind, f"{name}.")
    yield from _keys(schema, "")


def sections_of(schema: type) -> Iterator[tuple[str, Any]]:
    """Return the name and class of every section."""
    return ((field.name, field.type) for field in dataclasses.fields(schema) if _is_section(field))


def _keys(kind: type, prefix: str) -> Iterator[Key]:
    for field in dataclasses.fields(kind):
        if not _is_section(field):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Key(f"{prefix}{field.name}", field.type, default, **field.metadata)


def _is_section(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(field.type)


def key_descriptions(schema: type) -> Iterator[tuple[str, str, str]]:
    """Return path, default and meaning of every key of a schema, as text."""
    for known in keys_of(schema):
        default = str(getattr(known.default, "name", known.default)).replace("\n", "\\n")
        yield known.path, {"None": "null", "???": "required"}.get(default, default), known.meaning
