"""Brave Search: https://api-dashboard.search.brave.com/app/documentation/web-search

One request gives 20 results at most. `freshness` limits by date; the dates of results and pages decide all the same,
so that a page whose date nobody gives is not used with `web.before`.
"""

from datetime import date, timedelta

from replug.web.engines import EngineParts
from replug.web.records import EngineResult
from replug.web.search_api import ApiAddress, SearchApi, entries_at, query_of, ranked, required_key, search_limits

URL = "https://api.search.brave.com/res/v1/web/search"
RESULTS_PER_REQUEST = 20
MAX_PAGES = 10  # it takes no further offset
FIRST_DAY = "1990-01-01"


class BraveEngine:
    def __init__(self, parts: EngineParts, url: str = URL) -> None:
        self._web = parts.web
        refused = f"expected a key of its Web Search in the environment variable {parts.web.api_key_env}"
        address = ApiAddress(url, refused, required_key(parts.web), "X-Subscription-Token")
        self._api = SearchApi(address, parts.budget, search_limits(parts.web))
        self.identity = f"brave site:{parts.web.site} before:{parts.web.before}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        entries: list[tuple] = []
        for page in range(min(MAX_PAGES, -(-num_results // RESULTS_PER_REQUEST))):
            found = entries_at(self._api.get(self._parameters(query, num_results, page)), "web", "results")
            entries += [(entry.get("url"), entry.get("title"), entry.get("page_age")) for entry in found]
            if len(found) < RESULTS_PER_REQUEST:
                break
        return ranked(entries, num_results)

    def _parameters(self, query: str, num_results: int, page: int) -> dict[str, str | int]:
        count = min(RESULTS_PER_REQUEST, num_results)
        parameters: dict[str, str | int] = {"q": query_of(self._web, query), "count": count, "offset": page}
        if self._web.before:
            last = date.fromisoformat(self._web.before) - timedelta(days=1)
            parameters["freshness"] = f"{FIRST_DAY}to{last.isoformat()}"
        return parameters


ENGINE = BraveEngine
