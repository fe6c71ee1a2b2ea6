"""The engine that the caller has over its own documents (`web.local_engine`): nothing is asked for or fetched."""

from replug.config.errors import UserError
from replug.web.engine_kinds import EngineParts
from replug.web.records import SearchEngine


def _of_caller(parts: EngineParts) -> SearchEngine:
    if parts.local is None:
        raise UserError("web.engine=local searches documents, and there are none; expected a corpus or another engine")
    return parts.local


ENGINE = _of_caller
