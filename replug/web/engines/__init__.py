"""Search engines: each is a module whose `ENGINE` makes it, and the key `web.engine` names the module.

An engine is added by its file. `ENGINE(EngineParts)` returns a `SearchEngine`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.web.records import SearchEngine

if TYPE_CHECKING:  # which imports what takes seconds; the engines' names can do without
    from replug.models.http.request_budget import RequestBudget


@dataclass(frozen=True, slots=True)
class EngineParts:
    """`local` is an engine over documents that the caller has, None where it has none."""

    web: WebConfig
    budget: "RequestBudget"
    local: SearchEngine | None


MakeEngine = Callable[[EngineParts], SearchEngine]


def engine_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make_engine(parts: EngineParts) -> SearchEngine:
    """Raises UserError for a name that is none, and for what an engine lacks."""
    name = parts.web.engine
    if name not in engine_names():
        raise UserError(f"web.engine is {name}; expected one of: {', '.join(engine_names())}")
    make: MakeEngine = importlib.import_module(f"{__name__}.{name}").ENGINE
    return make(parts)
