"""What every key means, as `replug keys` lists it."""

from collections.abc import Iterator
from typing import Any

from replug.config.keys import keys_of
from replug.config.schema import Config


def key_descriptions(of: type = Config) -> Iterator[tuple[str, str, str]]:
    """Full path, default and meaning of every key of a schema: those of its sections, then its own."""
    return ((key.path, _shown(key.default), key.meaning) for key in keys_of(of))


def _shown(default: Any) -> str:
    if default is None:
        return "null"
    return "required" if default == "???" else str(getattr(default, "name", default)).replace("\n", "\\n")
