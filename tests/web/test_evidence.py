"""From a question to passages: engines, a SearXNG on loopback before a site of real passages, each rule on its own."""

import gzip
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.data.records import Document
from replug.models.ensemble import Retrieved
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.web.engine import EngineRefused, SearchEngine
from replug.web.evidence import EvidenceFinder, KeptPage
from replug.web.passages import (
    FoundEvidence,
    Passage,
    first_passages,
    found_in_documents,
    split_passages,
    tfidf_cosines,
)
from tests.support.shared_data import shared
from tests.support.web_site import FOOTER, QUICK, Route, WebSite, answer, article, redirect, searxng, web_site

PLACES = ["lighthouse", "harbour", "harbour", "harbour", "harbour"]
SENTENCES = [f"Fact {number} about the {PLACES[number % 5]} is told." for number in range(30)]


class Known(EvidenceFinder):
    """An engine that answers or refuses, and pages that are known."""

    identity = "fake"

    def __init__(self, folder: Path, *pages: KeptPage, refusal: str | None = None) -> None:
        super().__init__(WebConfig(engine="searxng", url="http://127.0.0.1"), folder)
        self._engine, self.refusal, self.pages = self, refusal, {page.url: page for page in pages}

    def search(self, query: str, num_results: int) -> list[dict]:
        if self.refusal:
            raise EngineRefused(self.refusal, "no")
        return [{"url": url, "title": "T", "rank": rank} for rank, url in enumerate(self.pages, 1)]

    def read(self, urls: Sequence[str]) -> list[KeptPage]:
        return [self.pages[url] for url in urls]


def page(number: int, text: str, **changes: object) -> KeptPage:
    url = f"https://{number}.test/"
    return KeptPage(**{"url": url, "fetched": "2024-05-01", "final_url": url, "text": text, **changes})


@pytest.fixture
def site() -> Iterator[WebSite]:
    with web_site() as made:
        yield made


def wikipedia(site: WebSite, count: int) -> tuple[list[Document], str]:
    """Real passages as pages of the site; the question about the first of them."""
    with gzip.open(shared("mini_wikipedia.jsonl.gz"), "rt") as file:
        given = (json.loads(line) for line in file)
        # trafilatura takes a menu for the text where a page has a line of its own only.
        rows = list(itertools.islice((row for row in given if len(row["text"]) > 400), count))
    for row in rows:
        site.routes[f"/wiki/{row['id']}"] = answer(article(row["title"], row["text"]))
    return [Document(f"/wiki/{row['id']}", row["text"], "", "") for row in rows], "when was the rapper Jay-Z born"


def test_real_pages_are_searched_fetched_split_and_ordered_then_repeated_without_network(site, tmp_path: Path) -> None:
    documents, question = wikipedia(site, 60)
    site.routes["/search"] = searxng(site, documents)
    web = WebConfig(engine="searxng", url=site.url, num_results=8)
    finder = EvidenceFinder(web, tmp_path, limits=QUICK, exempt=site.exempt)
    found = finder.find(question)
    finder.close()
    assert found.passages[0].url == f"{site.url}/wiki/p09137" and "born December 4, 1969" in found.passages[0].text
    cosines = [passage.cosine for passage in found.passages]
    assert cosines == sorted(cosines, reverse=True)
    assert [one.probability for one in found.passages] == pytest.approx([cosine / sum(cosines) for cosine in cosines])
    assert all(FOOTER not in passage.text and "Section 3" not in passage.text for passage in found.passages)
    assert len({passage.url for passage in found.passages}) == 8 and found.failures == {}
    assert all(passage.fetched and passage.rank in range(1, 9) for passage in found.passages)
    asked = site.requests.total()
    site.close()
    again = EvidenceFinder(web, tmp_path, limits=QUICK, exempt=site.exempt)
    assert again.find(question) == found
    assert site.requests.total() == asked
    assert json.loads((tmp_path / "requests.json").read_text())["requests"] == 1


def test_no_configuration_lets_a_page_of_this_machine_in(site: WebSite, tmp_path: Path) -> None:
    """The engine's own address may be on this machine; pages that it names may not."""
    results = [{"url": f"{site.url}/a"}, {"url": "http://127.0.0.1/a"}]
    site.routes["/search"] = answer(json.dumps({"results": results}).encode())
    web = WebConfig(engine="searxng", url=site.url)
    assert EvidenceFinder(web, tmp_path).find("q").failures == {"url_forbidden": 1, "forbidden_address": 1}
    assert set(site.requests) == {"/search"}


PROGRAM = """
import sys
from pathlib import Path
from replug.config.evaluation_schema import WebConfig
from replug.web.evidence import EvidenceFinder
from replug.web.fetch import FetchLimits
port, folder = int(sys.argv[1]), Path(sys.argv[2])
web = WebConfig(engine="searxng", url=f"http://127.0.0.1:{port}", num_results=4)
limits = FetchLimits(seconds=60.0, delay_seconds=0.0)
finder = EvidenceFinder(web, folder, limits=limits, exempt=[("127.0.0.1", port)])
print(len(finder.find("the lighthouse").passages))
finder.close()
"""


@pytest.mark.slow
def test_after_kill_9_nothing_that_was_answered_is_asked_for_again(site: WebSite, tmp_path: Path) -> None:
    results = [{"url": f"{site.url}/{number}", "title": "t"} for number in range(4)]
    site.routes["/search"] = answer(json.dumps({"results": results}).encode())
    for number in range(4):
        site.routes[f"/{number}"] = answer(" ".join(SENTENCES[number:]).encode(), content_type="text/plain")
    whole, hang = site.routes["/2"], lambda send, request: time.sleep(30)
    site.routes["/2"] = hang
    command = [sys.executable, "-c", PROGRAM, str(site.port), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while site.requests["/2"] == 0 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = len(list(tmp_path.glob("pages/*/*.json")))
    site.routes["/2"] = whole
    again = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    assert int(again.stdout) > 4 and done == 2
    assert [site.requests[path] for path in ("/search", "/0", "/1", "/2", "/3")] == [1, 1, 1, 2, 1]


def test_what_gives_nothing_is_counted_and_pages_with_the_same_text_or_url_count_once(tmp_path: Path) -> None:
    def find(*pages: KeptPage, **more: str) -> FoundEvidence:
        return Known(tmp_path / str(len(pages)) / str(more), *pages, **more).find("the lighthouse")

    assert find(refusal="rate_limited") == FoundEvidence((), {"engine_rate_limited": 1})
    assert find().failures == {"no_results": 1}
    assert find(page(1, "", failure="timeout")).failures == {"timeout": 1}
    found = find(page(1, "Same text."), page(2, "Same text."), page(3, "Other.", final_url="https://1.test/"))
    assert [passage.rank for passage in found.passages] == [1]
    assert found.failures == {"duplicate": 2}


def test_documents_are_cut_into_passages_and_ordered_by_their_words() -> None:
    texts = [" ".join(SENTENCES[number : number + 6]) for number in range(20)]
    documents = [Retrieved(text, 1.0, f"d{number}") for number, text in enumerate([*texts, texts[0]])]
    found = found_in_documents("where is the lighthouse", documents, 30)
    assert len(found.passages) == 20  # a document of six sentences stays whole
    assert found.failures == {"duplicate": 1}
    assert {passage.doc_id for passage in found.passages} == {f"d{number}" for number in range(20)}
    assert [passage.rank for passage in found.passages if passage.doc_id == "d3"] == [4]
    assert all(passage.fetched is None for passage in found.passages)
    assert len(found_in_documents("where is the lighthouse", documents, 7).passages) == 7
    assert found_in_documents("q", [], 7).failures == {"no_results": 1}


@pytest.mark.parametrize("engine", ["bing", "local"])
def test_a_wrong_engine_is_said_before_anything_is_asked(tmp_path: Path, engine: str) -> None:
    with pytest.raises(UserError, match=f"web.engine is {engine}"):
        EvidenceFinder(WebConfig(engine=engine), tmp_path)


def test_a_passage_is_six_sentences_and_the_last_is_the_rest() -> None:
    text = " ".join(f"Sentence number {number} is here." for number in range(14))
    passages = split_passages(text, 6)
    assert [passage.count(".") for passage in passages] == [6, 6, 2]
    assert " ".join(passages) == text


def test_a_passage_has_an_upper_length_where_no_sentence_ends() -> None:
    """A passage of six sentences had 9,999 words, which took the shots of every question."""
    for text in ("word " * 9999, "河" * 9999):
        passages = split_passages(text, 6)
        assert "".join(passages).replace(" ", "") == text.replace(" ", "")
        assert 1000 < max(len(passage.encode()) for passage in passages) <= 2048


def test_abbreviations_end_no_sentence_and_lines_end_one_but_no_passage() -> None:
    text = "Dr. Smith of the U.S. Army met J. R. R. Tolkien.\n\nA heading\nIt cost  $3.5 million."
    lines = ["Dr. Smith of the U.S. Army met J. R. R. Tolkien.", "A heading", "It cost $3.5 million."]
    assert split_passages(text, 1) == lines
    assert len(split_passages(text, 6)) == 1
    assert split_passages(" \n ", 6) == []


@pytest.mark.parametrize("mark", ["«", "“", "("])
def test_a_line_without_end_is_cut_into_sentences_in_time_that_grows_with_its_length(mark: str) -> None:
    begun = time.process_time()
    passages = split_passages(mark * 200_000, 6)
    assert time.process_time() - begun < 20  # a minute, if it were cut at once
    assert sum(passage.count(mark) for passage in passages) == 200_000
    sentence = "The Rhine flows through Basel and on to the north."
    assert split_passages(f"{sentence} " * 100, 1) == [sentence] * 100
    words = "word " * 1000
    assert " ".join(split_passages(words, 1)) == words.strip()


def test_cosines_equal_a_computation_by_hand() -> None:
    """Passages "red fox", "red hen", question "red fox cub": idf of red is 1, of fox 1 + log(3 / 2); cub is unknown."""
    fox = 1 + math.log(3 / 2)
    question, other = np.array([1, fox, 0]), np.array([1, 0, fox])
    expected = [1.0, other @ question / np.linalg.norm(other) / np.linalg.norm(question)]
    assert tfidf_cosines("Red fox cub?", ["red fox", "Red hen."]) == pytest.approx(expected)


def passages(*texts: str, probability: float = 0.25) -> list[Passage]:
    return [Passage(text, f"u{row}", "t", "2026-01-01", row, 0.1, probability) for row, text in enumerate(texts, 1)]


def test_the_first_passages_share_what_they_have_together():
    kept = first_passages([*passages("a", probability=0.3), *passages("b", probability=0.1), *passages("c")], 2)
    assert [one.probability for one in kept] == pytest.approx([0.75, 0.25])
    assert [one.probability for one in first_passages(passages("a", "b", probability=0.0), 2)] == [0.5, 0.5]
    assert first_passages([], 3) == []


KEY = "a-key-of-my-own"
PATHS = {"searxng": "/search", "brave": "/brave"}
FAST = {"SECONDS": 0.5, "MAX_BYTES": 2**16, "MAX_ATTEMPTS": 2, "BACKOFF_SECONDS": 0.01}


# Engines, each against a server that answers as the real one does, or goes wrong as it may ----------------------------


@pytest.fixture
def engines(site: WebSite, monkeypatch: pytest.MonkeyPatch) -> WebSite:
    monkeypatch.setenv("REPLUG_SEARCH_API_KEY", KEY)
    for name, value in FAST.items():
        monkeypatch.setattr(f"replug.web.engine.{name}", value)
    monkeypatch.setattr("replug.web.engine.BRAVE_URL", site.url + "/brave")
    return site


def engine(served: WebSite, name: str, budget: RequestBudget | None = None) -> SearchEngine:
    web = WebConfig(engine=name, url=served.url if name == "searxng" else None)
    return SearchEngine(web, budget or RequestBudget(None, section="web"))


def paged(name: str, per_page: int) -> Route:
    """Answers with a page of results without end, in the engine's own form."""

    def respond(send, request) -> None:
        query = request.query
        start = per_page * (int(query["pageno"]) - 1 if name == "searxng" else int(query["offset"]))
        rows = [{"url": f"https://{n}.test/", "title": f"T{n}"} for n in range(start, start + per_page)]
        body = {"results": rows} if name == "searxng" else {"web": {"results": rows}}
        answer(json.dumps(body).encode())(send, request)

    return respond


@pytest.mark.parametrize("name, per_page, requests", [("searxng", 10, 2), ("brave", 20, 1)])
def test_twenty_results_are_gathered_in_order(engines: WebSite, name: str, per_page: int, requests: int) -> None:
    engines.routes[PATHS[name]] = paged(name, per_page)
    results = engine(engines, name).search("who wrote faust", 20)
    assert results == [{"url": f"https://{n}.test/", "title": f"T{n}", "rank": n + 1} for n in range(20)]
    assert engines.requests[PATHS[name]] == requests
    assert all(request.query["q"] == "who wrote faust" for request in engines.seen)


def test_429_is_waited_for_as_long_as_it_asks(engines: WebSite) -> None:
    busy, fine = answer(b"{}", "429 Too Many", more=["Retry-After: 1"]), paged("searxng", 5)
    engines.routes["/search"] = lambda send, request: (busy if len(engines.seen) == 1 else fine)(send, request)
    begun = time.monotonic()
    assert len(engine(engines, "searxng").search("q", 5)) == 5
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
def test_an_engine_that_goes_wrong_has_refused_for_a_reason(engines, route: Route, reason: str, requests: int) -> None:
    engines.routes["/search"] = route
    with pytest.raises(EngineRefused) as refused:
        engine(engines, "searxng").search("q", 5)
    assert refused.value.reason == reason
    assert engines.requests["/search"] == requests


def test_a_key_goes_in_a_header_and_is_shown_nowhere(engines: WebSite) -> None:
    engines.routes["/brave"] = answer(json.dumps({"error": f"bad key {KEY}"}).encode(), "401 Unauthorized")
    made = engine(engines, "brave")
    with pytest.raises(UserError) as refused:
        made.search("q", 5)
    assert engines.seen[0].headers["x-subscription-token"] == KEY
    assert KEY not in engines.seen[0].target
    assert KEY not in f"{refused.value} {refused.value.__cause__} {made.identity} {made!r}"
    assert "REPLUG_SEARCH_API_KEY" in str(refused.value)


@pytest.mark.parametrize("key, message", [("", "needs a key"), ("a\nb", "no header may hold")])
def test_a_key_that_is_missing_or_cannot_be_sent_is_refused_first(engines, monkeypatch, key: str, message: str) -> None:
    monkeypatch.setenv("REPLUG_SEARCH_API_KEY", key)
    with pytest.raises(UserError, match=message):
        engine(engines, "brave")


def test_the_budget_is_never_passed_and_never_forgotten(engines: WebSite, tmp_path: Path) -> None:
    engines.routes["/search"] = answer(b"{}", "502 Bad Gateway")
    for _ in range(4):  # each a new process's view of the same file
        budget = RequestBudget(tmp_path / "requests.json", 5, section="web")
        with pytest.raises((BudgetSpent, EngineRefused)) as refused:
            engine(engines, "searxng", budget).search("q", 5)
    assert engines.requests["/search"] == 5 and "web.max_requests=5 is spent" in str(refused.value)
