"""Pages of a site on loopback, fetched and read for real: honest ones, and every hostile one within its limits."""

import gzip
import itertools
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.web.evidence import EvidenceFinder, KeptPage, Snapshot
from replug.web.extraction import Extractor, decode_page
from replug.web.fetch import USER_AGENT, FetchLimits
from tests.support.web_site import QUICK, WebSite, answer, article, hostile_pages, redirect, web_site

TEXT = "The lighthouse was built in 1871. It stands on a rock in the bay.\nIts keeper was the novelist's aunt."


@pytest.fixture
def site() -> Iterator[WebSite]:
    with web_site() as made:
        yield made


@pytest.fixture(scope="module")
def extractor() -> Iterator[Extractor]:
    made = Extractor(seconds=1.0)
    yield made
    made.close()


def read(
    site: WebSite, extractor: Extractor, folder: Path, *paths: str, limits: FetchLimits = QUICK
) -> dict[str, KeptPage]:
    finder = EvidenceFinder(WebConfig(engine="searxng", url=site.url), folder, limits, site.exempt)
    finder._extractor = extractor  # takes a second to start
    return dict(zip(paths, finder.read([site.url + path for path in paths]), strict=True))


def one(site: WebSite, extractor: Extractor, folder: Path, path: str) -> KeptPage:
    return read(site, extractor, folder, path)[path]


def test_every_hostile_page_ends_in_its_reason_within_the_limits(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    expected = hostile_pages(site)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = read(site, extractor, tmp_path, *expected)
    assert {path: page.failure for path, page in found.items()} == expected
    assert time.monotonic() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_hostile_page_does_no_harm_to_the_next(site: WebSite, extractor: Extractor, tmp_path: Path) -> None:
    hostile_pages(site)
    site.routes["/good"] = answer(article("Lighthouse", TEXT))
    found = read(site, extractor, tmp_path, "/many_attributes", "/good")
    assert found["/many_attributes"].failure == "extraction_timeout"
    assert found["/good"].text.splitlines()[-1] == "Its keeper was the novelist's aunt."


def test_a_page_is_asked_for_once_a_snapshot_and_so_is_one_that_failed(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    site.routes["/a"] = answer(article("Lighthouse", TEXT))
    first = read(site, extractor, tmp_path, "/a", "/missing")
    assert read(site, extractor, tmp_path, "/a", "/missing", "/a") == first
    assert (site.requests["/a"], site.requests["/missing"], site.requests["/robots.txt"]) == (1, 1, 1)
    assert first["/missing"].failure == "status_404"


def test_redirects_are_followed_and_the_last_url_is_kept(site: WebSite, extractor: Extractor, tmp_path: Path) -> None:
    site.routes |= {"/a": redirect("b?x=1", "301 Moved"), "/b": redirect("/c", "307 Moved")}
    site.routes["/c"] = answer(article("Lighthouse", TEXT))
    assert one(site, extractor, tmp_path, "/a").final_url == f"{site.url}/c"


@pytest.mark.parametrize("start", [0, 300])
def test_compressed_pages_are_unpacked(site: WebSite, extractor: Extractor, tmp_path: Path, start: int) -> None:
    body = article("Lighthouse", TEXT)
    packed = gzip.compress(body[:start]) + gzip.compress(body[start:])  # one or two members
    site.routes["/a"] = answer(packed, more=["Content-Encoding: gzip"])
    assert "The lighthouse was built in 1871." in one(site, extractor, tmp_path, "/a").text


def test_robots_are_heeded_by_our_name_and_asked_for_once(site: WebSite, extractor: Extractor, tmp_path: Path) -> None:
    rules = b"User-agent: *\nDisallow: /\n\nUser-agent: replug\nDisallow: /private/*\nAllow: /private/open$\n"
    site.routes["/robots.txt"] = answer(rules, content_type="text/plain")
    for path in ("/a", "/private/b", "/private/open"):
        site.routes[path] = answer(article(path, TEXT + path))
    found = read(site, extractor, tmp_path, "/a", "/private/b", "/private/open")
    assert [page.failure for page in found.values()] == [None, "robots", None]
    assert (site.requests["/robots.txt"], site.requests["/private/b"]) == (1, 0)
    assert {request.headers["user-agent"] for request in site.seen} == {USER_AGENT}


def test_thousands_of_rules_for_thousands_of_agents_are_unreadable_at_once(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    agents, rules = (b"".join(b"%s: a%d\n" % (name, n) for n in range(9000)) for name in (b"User-agent", b"Disallow"))
    site.routes["/robots.txt"] = answer(agents + rules, content_type="text/plain")
    begun = time.process_time()
    assert one(site, extractor, tmp_path, "/a").failure == "robots_unreadable"
    assert time.process_time() - begun < 5  # minutes, if each agent had a copy of all rules


def test_an_unreadable_robots_txt_forbids_everything_and_redirects_obey_it_too(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    site.routes |= {"/robots.txt": answer(b"", "503 Busy"), "/no": answer(article("a", TEXT)), "/a": redirect("/no")}
    assert one(site, extractor, tmp_path / "1", "/a").failure == "robots_unreadable"
    site.routes["/robots.txt"] = answer(b"User-agent: *\nDisallow: /no", content_type="text/plain")
    assert one(site, extractor, tmp_path / "2", "/a").failure == "robots"
    assert site.requests["/no"] == 0


def test_a_host_is_asked_one_thing_at_a_time_with_a_pause(site: WebSite, extractor: Extractor, tmp_path: Path) -> None:
    times: list[float] = []
    page = answer(b"Plain text is read as it is.", content_type="text/plain")
    for number in range(3):
        site.routes[f"/{number}"] = lambda send, request: (times.append(time.monotonic()), page(send, request))[1]
    read(site, extractor, tmp_path, "/0", "/1", "/2", limits=replace(QUICK, delay_seconds=0.2))
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(times))


def test_a_delay_that_robots_ask_for_is_kept(site: WebSite, extractor: Extractor, tmp_path: Path) -> None:
    site.routes |= {"/a": answer(b"text", content_type="text/plain"), "/b": answer(b"more", content_type="text/plain")}
    site.routes["/robots.txt"] = answer(b"User-agent: *\nCrawl-delay: 0.3", content_type="text/plain")
    begun = time.monotonic()
    assert not any(page.failure for page in read(site, extractor, tmp_path, "/a", "/b").values())
    assert time.monotonic() - begun >= 0.3


def test_a_page_that_waits_too_long_for_its_turn_is_given_up(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    hostile_pages(site)
    limits = replace(QUICK, seconds_to_wait=3.5)
    found = read(site, extractor, tmp_path, "/silent", "/drip", limits=limits)
    assert {page.failure for page in found.values()} == {"timeout", "no_turn"}


def test_a_server_of_this_machine_is_read_only_where_the_caller_names_it(site: WebSite, tmp_path: Path) -> None:
    site.routes["/a"] = answer(article("a", TEXT))
    pages = EvidenceFinder(WebConfig(engine="searxng", url=site.url), tmp_path, QUICK)
    assert pages.read([f"{site.url}/a"])[0].failure == "url_forbidden"
    assert pages.read(["http://127.0.0.1/a"])[0].failure == "forbidden_address"
    assert not site.requests


SENTENCE = "Größe, naïve café und Straße"


META = "<html><head><meta charset='{}'></head><body>"


@pytest.mark.parametrize(
    "text, encoding, named",
    [
        *((SENTENCE, encoding, "header") for encoding in ("utf-8", "windows-1252", "iso-8859-15", "utf-16")),
        *((SENTENCE, "iso-8859-1", "page"), ("灯台は岩の上", "shift_jis", "page"), ("Маяк", "koi8-r", "page")),
        *((SENTENCE, encoding, "mark") for encoding in ("utf-8-sig", "utf-16")),
    ],
)
def test_the_header_else_the_page_else_its_first_bytes_say_the_encoding(text: str, encoding: str, named: str) -> None:
    header = f'text/html; charset="{encoding}"' if named == "header" else "text/html"
    head = META.format(encoding) if named == "page" else ""
    assert decode_page((head + text).encode(encoding), header) == head + text


@pytest.mark.parametrize("encoding", ["unicode_escape", "utf-7", "idna", "hex", "rot13", "zip", "../x", "no-such"])
def test_a_name_that_is_no_encoding_of_pages_is_not_used(encoding: str) -> None:
    text = f"{SENTENCE} \\u0041 +AEE-"
    assert decode_page(text.encode(), f"text/html; charset={encoding}") == text


def test_broken_bytes_become_replacement_characters_and_the_text_stays() -> None:
    found = decode_page(b"A page with one \xff and another \xfe of them", "text/html; charset=utf-8")
    assert found == "A page with one \ufffd and another \ufffd of them"


def only_file(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


def test_a_flipped_bit_and_an_entry_of_another_page_are_refused_by_name(tmp_path: Path) -> None:
    request, page = {"url": "https://a.test/"}, {"url": "https://a.test/", "text": "Größe \ud800 \n text"}
    Snapshot(tmp_path / "a").write("pages", request, page)
    path = only_file(tmp_path / "a")
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=path.name):
            Snapshot(tmp_path / "a").read(["pages"], request)
    Snapshot(tmp_path / "b").write("pages", {"url": "https://b.test/"}, {**page, "url": "https://b.test/"})
    path.write_bytes(only_file(tmp_path / "b").read_bytes())
    with pytest.raises(UserError, match="is damaged"):
        Snapshot(tmp_path / "a").read(["pages"], request)
