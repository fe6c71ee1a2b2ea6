"""SearXNG, self-hosted: https://docs.searxng.org/dev/search_api.html

It has no limit by date, so with `web.before` the dates of results and pages decide. A page of its answer holds what its
engines gave, some ten to thirty results: further pages are asked for until there are enough.
"""

from replug.web.engines import EngineParts
from replug.web.records import EngineRefused, EngineResult
from replug.web.search_api import ApiAddress, SearchApi, entries_at, query_of, ranked, search_limits

MAX_PAGES = 3
REFUSED = (
    "a SearXNG gives JSON only where its settings.yml allows it: expected `search: formats: [html, json]` there, and a "
    "limiter that lets this machine through"
)


class SearxngEngine:
    def __init__(self, parts: EngineParts) -> None:
        self._web, url = parts.web, str(parts.web.url).rstrip("/")
        self._api = SearchApi(ApiAddress(f"{url}/search", REFUSED), parts.budget, search_limits(parts.web))
        self.identity = f"searxng {url}" + (f" site:{parts.web.site}" if parts.web.site else "")

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        """Raises EngineRefused where none of its own engines answered."""
        entries: list[tuple] = []
        for page in range(1, MAX_PAGES + 1):
            body = self._api.get({"q": query_of(self._web, query), "format": "json", "pageno": page})
            found, before = entries_at(body, "results"), len(ranked(entries, num_results))
            entries += [(entry.get("url"), entry.get("title"), entry.get("publishedDate")) for entry in found]
            if len(ranked(entries, num_results)) in (before, num_results):  # nothing new, or enough
                break
        if not entries and isinstance(body, dict) and body.get("unresponsive_engines"):
            raise EngineRefused("engines_unresponsive", str(body["unresponsive_engines"])[:200])
        return ranked(entries, num_results)


ENGINE = SearxngEngine
