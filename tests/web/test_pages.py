"""Pages of a site on loopback, fetched and read for real: honest ones, and every hostile one within its limits."""

import gzip
import itertools
import resource
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.web.evidence import EvidenceFinder, KeptPage, Snapshot
from replug.web.extraction import Extractor, decode_page
from replug.web.fetch import AGENT, USER_AGENT, Fetcher, FetchLimits, parse_robots
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
    finder = EvidenceFinder(None, None, Snapshot(folder), Fetcher(limits, site.exempt), extractor)
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


@pytest.mark.parametrize("coding", ["gzip", "members", "deflate", "raw deflate"])
def test_compressed_pages_are_unpacked(site: WebSite, extractor: Extractor, tmp_path: Path, coding: str) -> None:
    body = article("Lighthouse", TEXT)
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(body),
        "members": gzip.compress(body[:300]) + gzip.compress(body[300:]),
        "deflate": zlib.compress(body),
        "raw deflate": raw.compress(body) + raw.flush(),
    }[coding]
    name = "deflate" if "deflate" in coding else "gzip"
    site.routes["/a"] = answer(packed, more=[f"Content-Encoding: {name}"])
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


def test_the_rules_of_thousands_of_agents_are_read_at_once_and_ours_stay() -> None:
    others, rules = (lambda n: "".join(f"User-agent: a{i}\n" for i in range(n))), "Disallow: /b\nAllow: /b/c\n"
    begun = time.process_time()
    read = parse_robots(
        others(9000) + "".join(f"Disallow: /{i}\n" for i in range(9000)) + "User agent rePlug # us\n" + rules
    )
    assert parse_robots("\n" * 500_000 + "User-agent: *\rDisallow: /b\r").can_fetch("http://x/b", AGENT) is False
    assert time.process_time() - begun < 5  # minutes, if each agent had a copy of all rules
    for found in (read, parse_robots(others(2) + f"user-agent:*\n{rules}"), parse_robots(f"User-agent: rep*\n{rules}")):
        assert [found.can_fetch(f"http://x/{path}", AGENT) for path in ("a", "b", "b/c", "7")] == [
            True,
            False,
            True,
            True,
        ]


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


def test_a_delay_that_robots_ask_for_is_kept_and_one_too_long_is_not_waited_for(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    site.routes |= {"/a": answer(b"text", content_type="text/plain"), "/b": answer(b"more", content_type="text/plain")}
    site.routes["/robots.txt"] = answer(b"User-agent: *\nCrawl-delay: 0.3", content_type="text/plain")
    begun = time.monotonic()
    assert not any(page.failure for page in read(site, extractor, tmp_path / "1", "/a", "/b").values())
    assert time.monotonic() - begun >= 0.3
    site.routes["/robots.txt"] = answer(b"User-agent: *\nCrawl-delay: 3600", content_type="text/plain")
    assert one(site, extractor, tmp_path / "2", "/a").failure == "crawl_delay"


def test_a_page_that_waits_too_long_for_its_turn_is_given_up(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    hostile_pages(site)
    limits = replace(QUICK, seconds_to_wait=3.5)
    found = read(site, extractor, tmp_path, "/silent", "/drip", limits=limits)
    assert {page.failure for page in found.values()} == {"timeout", "no_turn"}


def test_a_server_of_this_machine_is_read_only_where_the_caller_names_it(
    site: WebSite, extractor: Extractor, tmp_path: Path
) -> None:
    site.routes["/a"] = answer(article("a", TEXT))
    pages = EvidenceFinder(None, None, Snapshot(tmp_path), Fetcher(QUICK), extractor)
    assert pages.read([f"{site.url}/a", "http://127.0.0.1/a"])[0].failure == "url_port"
    assert pages.read(["http://127.0.0.1/a"])[0].failure == "forbidden_address"
    assert not site.requests


SENTENCE = "Größe, naïve café und Straße"


def meta(encoding: str) -> bytes:
    return f"<html><head><meta charset='{encoding}'></head><body>".encode()


@pytest.mark.parametrize("encoding", ["utf-8", "windows-1252", "iso-8859-15", "utf-16"])
def test_the_header_says_the_encoding(encoding: str) -> None:
    found = decode_page(SENTENCE.encode(encoding), f'text/html; charset="{encoding}"')
    assert found == (SENTENCE, 0)


@pytest.mark.parametrize(
    "text, encoding", [(SENTENCE, "iso-8859-1"), ("灯台は岩の上", "shift_jis"), ("Маяк", "koi8-r")]
)
def test_the_page_says_the_encoding_where_the_header_does_not(text: str, encoding: str) -> None:
    assert decode_page(meta(encoding) + text.encode(encoding), "text/html")[0].endswith(text)


@pytest.mark.parametrize("encoding", ["unicode_escape", "utf-7", "idna", "hex", "rot13", "zip", "../x", "no-such"])
def test_a_name_that_is_no_encoding_of_pages_is_not_used(encoding: str) -> None:
    text = f"{SENTENCE} \\u0041 +AEE-"
    assert decode_page(text.encode(), f"text/html; charset={encoding}")[0] == text


def test_broken_bytes_are_counted_and_the_text_stays() -> None:
    found = decode_page(b"A page with one \xff and another \xfe of them", "text/html; charset=utf-8")
    assert found == ("A page with one \ufffd and another \ufffd of them", 2)


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
