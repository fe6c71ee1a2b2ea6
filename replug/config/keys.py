"""What is known of a key of the configuration, written in its dataclass field: the one place where it stands.

    k: int = key(20, "documents for each training text", RULED)

says the default, the meaning that `replug keys` shows, the bounds that `config.rules` checks, and whether a resumed
run may change it. `keys_of` reads all of it back, and
`key_descriptions` is what `replug keys` lists.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Bounds(Enum):
    """Which numbers a key takes; the value says so in the error."""

    positive = "a number above 0"
    not_negative = "0 or more"
    share = "a share between 0 and 1"
    ruled = "as config.rules says"  # more than a range, or together with other keys

    def hold(self, value: float) -> bool:
        """NaN and infinity are no number; what is ruled is not looked at here."""
        if self is Bounds.ruled:
            return True
        if self is Bounds.positive:
            return 0 < value < math.inf
        return 0 <= value <= 1 if self is Bounds.share else 0 <= value < math.inf


ABOVE_0, FROM_0, SHARE, RULED = Bounds.positive, Bounds.not_negative, Bounds.share, Bounds.ruled


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration. `bounds` are None where it is no number."""

    path: str  # such as train.lr
    kind: Any  # its type
    default: Any  # "???" where it must be given
    meaning: str
    bounds: Bounds | None
    resumable: bool


def key(default: Any, meaning: str, bounds: Bounds | None = None, resumable: bool = False) -> Any:
    """A dataclass field. `resumable` keys change neither what is computed nor in which order."""
    told = {"meaning": meaning, "bounds": bounds, "resumable": resumable}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=told)
    return dataclasses.field(default=default, metadata=told)


def section(kind: type, **defaults: Any) -> Any:
    """A dataclass field that holds a section of keys."""
    return dataclasses.field(default_factory=lambda: kind(**defaults))


def keys_of(schema: type) -> Iterator[Key]:
    """Every key of a schema in its order: those of its sections, then its own."""
    for name, kind in sections_of(schema):
        yield from _keys(kind, f"{name}.")
    yield from _keys(schema, "")


def sections_of(schema: type) -> Iterator[tuple[str, Any]]:
    """Name and class of every section."""
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
