"""Google Programmable Search, closed to new customers: https://developers.google.com/custom-search/v1/reference

One request gives 10 results at most. Its key goes in a header, so that no URL holds it. `sort=date:r` limits by date;
the dates of pages decide all the same.
"""

from datetime import date, timedelta

from replug.web.engines import EngineParts
from replug.web.records import EngineResult
from replug.web.search_api import ApiAddress, SearchApi, entries_at, ranked, required_key, search_limits

URL = "https://customsearch.googleapis.com/customsearch/v1"
RESULTS_PER_REQUEST = 10
MAX_RESULTS = 100  # of one query
FIRST_DAY = "19900101"


class GoogleEngine:
    def __init__(self, parts: EngineParts, url: str = URL) -> None:
        self._web = parts.web
        refused = f"expected a key of Programmable Search in ${parts.web.api_key_env}, and its engine at web.google_cx"
        address = ApiAddress(url, refused, required_key(parts.web), "X-Goog-Api-Key")
        self._api = SearchApi(address, parts.budget, search_limits(parts.web))
        self.identity = f"google {parts.web.google_cx} site:{parts.web.site} before:{parts.web.before}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        entries: list[tuple] = []
        for start in range(0, min(MAX_RESULTS, num_results), RESULTS_PER_REQUEST):
            found = entries_at(self._api.get(self._parameters(query, start)), "items")
            entries += [(entry.get("link"), entry.get("title"), None) for entry in found]
            if len(found) < RESULTS_PER_REQUEST:
                break
        return ranked(entries, num_results)

    def _parameters(self, query: str, start: int) -> dict[str, str | int]:
        parameters: dict[str, str | int] = {
            "q": query,
            "cx": str(self._web.google_cx),
            "num": RESULTS_PER_REQUEST,
            "start": start + 1,
        }
        if self._web.site:
            parameters |= {"siteSearch": self._web.site, "siteSearchFilter": "i"}
        if self._web.before:
            last = date.fromisoformat(self._web.before) - timedelta(days=1)
            parameters["sort"] = f"date:r:{FIRST_DAY}:{last:%Y%m%d}"
        return parameters


ENGINE = GoogleEngine
