"""Several public engines without a key, by the package `ddgs`, an extra: pip install "replug[ddgs]".

It asks engines that offer no API, so it is slower, refused sooner, and in another order each time: a snapshot keeps
what it gave. A search is one request of the budget, whatever the package sends for it. Whether engines allow this is
for the user to know.
"""

import asyncio

from replug.config.errors import require_extra
from replug.web.engines import EngineParts
from replug.web.records import EngineRefused, EngineResult
from replug.web.search_api import RequestPace, query_of, ranked

SECONDS = 20
NOTHING_FOUND = "No results found."  # what it raises for an empty answer


class DdgsEngine:
    def __init__(self, parts: EngineParts) -> None:
        require_extra("ddgs", "ddgs", what="web.engine=ddgs")
        import ddgs.exceptions

        self._ddgs, self._web, self._budget = ddgs, parts.web, parts.budget
        self._pace = RequestPace(parts.web.requests_per_second)
        self.identity = f"ddgs site:{parts.web.site}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        asyncio.run(self._pace.turn())
        self._budget.reserve(0)
        try:
            found = self._ddgs.DDGS(timeout=SECONDS).text(query_of(self._web, query), max_results=num_results)
        except self._ddgs.exceptions.RatelimitException as error:
            raise EngineRefused("rate_limited", str(error)) from error
        except self._ddgs.exceptions.DDGSException as error:
            if str(error) == NOTHING_FOUND:
                return []
            raise EngineRefused("failed", str(error)) from error
        finally:
            self._budget.settle(0, 0)
        return ranked([(entry.get("href"), entry.get("title"), None) for entry in found], num_results)


ENGINE = DdgsEngine
