"""Every engine against a server that answers as the real one does, or goes wrong as it may. Loopback only."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.web.engine import EngineRefused, SearchEngine
from tests.support.web_site import Route, WebSite, answer, redirect, web_site

KEY = "a-key-of-my-own"
PATHS = {"searxng": "/search", "brave": "/brave"}
FAST = {"SECONDS": 0.5, "MAX_BYTES": 2**16, "MAX_ATTEMPTS": 2, "BACKOFF_SECONDS": 0.01}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebSite]:
    monkeypatch.setenv("REPLUG_SEARCH_API_KEY", KEY)
    for name, value in FAST.items():
        monkeypatch.setattr(f"replug.web.engine.{name}", value)
    with web_site() as made:
        monkeypatch.setattr("replug.web.engine.BRAVE_URL", made.url + "/brave")
        yield made


def engine(served: WebSite, name: str, budget: RequestBudget | None = None, **changes: object) -> SearchEngine:
    url = served.url if name == "searxng" else None
    web = WebConfig(engine=name, url=url, **changes)
    return SearchEngine(web, budget or RequestBudget(None, section="web"))


def found(name: str, start: int, count: int) -> bytes:
    """An answer of so many results in the engine's own form."""
    numbers = range(start, start + count)
    rows = [{"url": f"https://{n}.test/", "title": f"T{n}"} for n in numbers]
    return json.dumps({"results": rows} if name == "searxng" else {"web": {"results": rows}}).encode()


def paged(name: str, per_page: int, total: int) -> Route:
    def respond(send, request) -> None:
        query = request.query
        start = per_page * (int(query["pageno"]) - 1 if name == "searxng" else int(query["offset"]))
        answer(found(name, start, max(0, min(per_page, total - start))))(send, request)

    return respond


@pytest.mark.parametrize("name, per_page, requests", [("searxng", 10, 2), ("brave", 20, 1)])
def test_twenty_results_are_gathered_in_order(site: WebSite, name: str, per_page: int, requests: int) -> None:
    site.routes[PATHS[name]] = paged(name, per_page, 100)
    results = engine(site, name).search("who wrote faust", 20)
    assert results == [{"url": f"https://{n}.test/", "title": f"T{n}", "rank": n + 1} for n in range(20)]
    assert site.requests[PATHS[name]] == requests
    assert all(request.query["q"] == "who wrote faust" for request in site.seen)


def test_429_is_waited_for_as_long_as_it_asks(site: WebSite) -> None:
    busy, fine = answer(b"{}", "429 Too Many", more=["Retry-After: 1"]), paged("searxng", 20, 5)
    site.routes["/search"] = lambda send, request: (busy if len(site.seen) == 1 else fine)(send, request)
    begun = time.monotonic()
    assert len(engine(site, "searxng").search("q", 5)) == 5
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize(
    "route, reason, requests",
    [
        (answer(b"{}", "429 Too Many"), "rate_limited", 2),
        (answer(b"{}", "429 Too Many", more=["Retry-After: 3600"]), "rate_limited", 1),
        (answer(b"{}", "502 Bad Gateway"), "failed", 2),
        (lambda send, request: time.sleep(3), "failed", 2),
        (answer(b'{"results": 3}'), "ill_formed", 1),
        (answer(b" " * (2**17)), "ill_formed", 1),
        (answer(gzip.compress(bytes(2**24)), more=["Content-Encoding: gzip"]), "ill_formed", 1),
        (answer(gzip.compress(gzip.compress(b"{}")), more=["Content-Encoding: gzip, gzip"]), "ill_formed", 1),
        (answer(b"{}", "400 Bad Request"), "status_400", 1),
        (redirect("http://127.0.0.1:9/"), "status_302", 1),
        (answer(b'{"results": [], "unresponsive_engines": [["bing", "timeout"]]}'), "engines_unresponsive", 1),
    ],
)
def test_an_engine_that_goes_wrong_has_refused_for_a_reason(
    site: WebSite, route: Route, reason: str, requests: int
) -> None:
    site.routes["/search"] = route
    with pytest.raises(EngineRefused) as refused:
        engine(site, "searxng").search("q", 5)
    assert refused.value.reason == reason
    assert site.requests["/search"] == requests


def test_a_key_goes_in_a_header_and_is_shown_nowhere(site: WebSite) -> None:
    site.routes["/brave"] = answer(json.dumps({"error": f"bad key {KEY}"}).encode(), "401 Unauthorized")
    made = engine(site, "brave")
    with pytest.raises(UserError) as refused:
        made.search("q", 5)
    assert site.seen[0].headers["x-subscription-token"] == KEY
    assert KEY not in site.seen[0].target
    assert KEY not in f"{refused.value} {refused.value.__cause__} {made.identity} {made!r}"
    assert "REPLUG_SEARCH_API_KEY" in str(refused.value)


@pytest.mark.parametrize("key, message", [("", "needs a key"), ("a\nb", "no header may hold")])
def test_a_key_that_is_missing_or_cannot_be_sent_is_refused_first(
    site: WebSite, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    monkeypatch.setenv("REPLUG_SEARCH_API_KEY", key)
    with pytest.raises(UserError, match=message):
        engine(site, "brave")


def test_the_budget_is_never_passed_and_never_forgotten(site: WebSite, tmp_path: Path) -> None:
    site.routes["/search"] = answer(b"{}", "502 Bad Gateway")
    for _ in range(4):  # each a new process's view of the same file
        with pytest.raises((BudgetSpent, EngineRefused)):
            engine(site, "searxng", RequestBudget(tmp_path / "requests.json", 5, section="web")).search("q", 5)
    assert site.requests["/search"] == 5
    with pytest.raises(BudgetSpent, match=r"web\.max_requests=5 is spent"):
        engine(site, "searxng", RequestBudget(tmp_path / "requests.json", 5, section="web")).search("q", 5)
