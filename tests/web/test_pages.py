"""Pages fetched and read for real: honest ones, every hostile one within its limits, and none of a private address."""

import asyncio
import gzip
import itertools
import resource
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpcore
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.web.evidence import EvidenceFinder, KeptPage, Snapshot
from replug.web.extraction import Extractor, FetchFailed, decode_page
from replug.web.fetch import USER_AGENT, Downloaded, Fetcher, FetchLimits, is_public
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


@pytest.fixture
def read(site: WebSite, extractor: Extractor, tmp_path: Path) -> Callable[..., dict[str, KeptPage]]:
    def read_paths(*paths: str, limits: FetchLimits = QUICK, folder: str = "pages") -> dict[str, KeptPage]:
        finder = EvidenceFinder(WebConfig(engine="searxng", url=site.url), tmp_path / folder, limits, site.exempt)
        finder._extractor = extractor  # takes a second to start
        return dict(zip(paths, finder.read([site.url + path for path in paths]), strict=True))

    return read_paths


def test_every_hostile_page_ends_in_its_reason_within_the_limits_and_does_no_harm_to_the_next(site, read) -> None:
    expected = {**hostile_pages(site), "/good": None}
    site.routes["/good"] = answer(article("Lighthouse", TEXT))
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = read(*expected, limits=replace(QUICK, seconds=1.0))
    assert {path: page.failure for path, page in found.items()} == expected
    assert found["/good"].text.splitlines()[-1] == "Its keeper was the novelist's aunt."
    assert time.monotonic() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_page_is_asked_for_once_a_snapshot_and_so_is_one_that_failed(site, read) -> None:
    site.routes["/a"] = answer(article("Lighthouse", TEXT))
    first = read("/a", "/missing")
    assert read("/a", "/missing", "/a") == first
    assert (site.requests["/a"], site.requests["/missing"], site.requests["/robots.txt"]) == (1, 1, 1)
    assert first["/missing"].failure == "status_404"


def test_redirects_are_followed_and_the_last_url_is_kept(site, read) -> None:
    site.routes |= {"/a": redirect("b?x=1", "301 Moved"), "/b": redirect("/c", "307 Moved")}
    site.routes["/c"] = answer(article("Lighthouse", TEXT))
    assert read("/a")["/a"].final_url == f"{site.url}/c"


@pytest.mark.parametrize("start", [0, 300])
def test_compressed_pages_are_unpacked(site, read, start: int) -> None:
    body = article("Lighthouse", TEXT)
    packed = gzip.compress(body[:start]) + gzip.compress(body[start:])  # one or two members
    site.routes["/a"] = answer(packed, more=["Content-Encoding: gzip"])
    assert "The lighthouse was built in 1871." in read("/a")["/a"].text


def test_robots_are_heeded_by_our_name_and_asked_for_once(site, read) -> None:
    rules = b"User-agent: *\nDisallow: /\n\nUser-agent: replug\nDisallow: /private/*\nAllow: /private/open$\n"
    site.routes["/robots.txt"] = answer(rules, content_type="text/plain")
    for path in ("/a", "/private/b", "/private/open"):
        site.routes[path] = answer(article(path, TEXT + path))
    found = read("/a", "/private/b", "/private/open")
    assert [page.failure for page in found.values()] == [None, "robots", None]
    assert (site.requests["/robots.txt"], site.requests["/private/b"]) == (1, 0)
    assert {request.headers["user-agent"] for request in site.seen} == {USER_AGENT}


def test_thousands_of_rules_for_thousands_of_agents_are_unreadable_at_once(site, read) -> None:
    agents, rules = (b"".join(b"%s: a%d\n" % (name, n) for n in range(9000)) for name in (b"User-agent", b"Disallow"))
    site.routes["/robots.txt"] = answer(agents + rules, content_type="text/plain")
    begun = time.process_time()
    assert read("/a")["/a"].failure == "robots_unreadable"
    assert time.process_time() - begun < 5  # minutes, if each agent had a copy of all rules


def test_an_unreadable_robots_txt_forbids_everything_and_redirects_obey_it_too(site, read) -> None:
    site.routes |= {"/robots.txt": answer(b"", "503 Busy"), "/no": answer(article("a", TEXT)), "/a": redirect("/no")}
    assert read("/a", folder="1")["/a"].failure == "robots_unreadable"
    site.routes["/robots.txt"] = answer(b"User-agent: *\nDisallow: /no", content_type="text/plain")
    assert read("/a", folder="2")["/a"].failure == "robots"
    assert site.requests["/no"] == 0


def test_a_host_is_asked_one_thing_at_a_time_with_a_pause(site, read) -> None:
    times: list[float] = []
    page = answer(b"Plain text is read as it is.", content_type="text/plain")
    for number in range(3):
        site.routes[f"/{number}"] = lambda send, request: (times.append(time.monotonic()), page(send, request))[1]
    read("/0", "/1", "/2", limits=replace(QUICK, delay_seconds=0.2))
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(times))


def test_a_delay_that_robots_ask_for_is_kept(site, read) -> None:
    site.routes |= {"/a": answer(b"text", content_type="text/plain"), "/b": answer(b"more", content_type="text/plain")}
    site.routes["/robots.txt"] = answer(b"User-agent: *\nCrawl-delay: 0.3", content_type="text/plain")
    begun = time.monotonic()
    assert not any(page.failure for page in read("/a", "/b").values())
    assert time.monotonic() - begun >= 0.3


def test_a_page_that_waits_too_long_for_its_turn_is_given_up(site, read) -> None:
    hostile_pages(site)
    limits = replace(QUICK, seconds_to_wait=2.25)
    found = read("/silent", "/drip", limits=limits)
    assert {page.failure for page in found.values()} == {"timeout", "no_turn"}


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


# A name that resolves to a private address, at once or later, leads nowhere. Resolver and network are stand-ins -------

PUBLIC, OTHER_PUBLIC = "93.184.216.34", "2606:4700::1111"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nok"
NO_ROBOTS = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class FakeStream(httpcore.AsyncNetworkStream):
    """Answers what it was made with, and remembers what was sent and whose certificate was asked for."""

    def __init__(self, network: "FakeNetwork") -> None:
        self._network, self._left = network, b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        given, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return given

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._network.sent += [buffer] if buffer else []
        if buffer.startswith(b"GET"):
            path = buffer.split()[1].decode()
            self._left = NO_ROBOTS if path == "/robots.txt" else self._network.answers.get(path, PAGE)

    async def aclose(self) -> None: ...

    async def start_tls(self, ssl_context, server_hostname=None, timeout=None) -> httpcore.AsyncNetworkStream:
        assert ssl_context.verify_mode is ssl.CERT_REQUIRED and ssl_context.check_hostname
        self._network.tls_names.append(server_hostname)
        return self

    def get_extra_info(self, info: str) -> Any:
        return None


class FakeNetwork(httpcore.AsyncNetworkBackend):
    def __init__(self, answers: dict[str, bytes] | None = None, dead: Iterable[str] = ()) -> None:
        self.answers, self.dead = answers or {}, set(dead)
        self.connected: list[tuple[str, int]] = []
        self.sent: list[bytes] = []
        self.tls_names: list[str | None] = []

    async def connect_tcp(self, host, port, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        if host in self.dead:
            raise httpcore.ConnectError("dead")
        return FakeStream(self)


class FakeResolver:
    """Each look-up of a name gives its next answer, and the last one from then on."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        given = self._answers[host]
        return given.pop(0) if len(given) > 1 else given[0]


def fetch(url: str, resolver: FakeResolver, network: FakeNetwork) -> Downloaded:
    async def run() -> Downloaded:
        async with Fetcher(QUICK, resolve=resolver, network=network).session() as session:
            return await session.fetch(url)

    return asyncio.run(run())


def refusal(url: str, resolver: FakeResolver, network: FakeNetwork) -> str:
    with pytest.raises(FetchFailed) as failed:
        fetch(url, resolver, network)
    return failed.value.reason


def test_the_connection_goes_to_the_address_that_was_judged_and_tls_has_the_name() -> None:
    network, resolver = FakeNetwork(), FakeResolver(site_test=[[PUBLIC]])
    assert fetch("https://site.test/page?q=1#place", resolver, network).body == b"ok"
    assert network.connected == [(PUBLIC, 443)] * 2  # robots.txt, page
    assert network.tls_names == ["site.test"] * 2
    assert network.sent[1].startswith(b"GET /page?q=1 HTTP/1.1\r\n")
    assert b"Host: site.test\r\n" in network.sent[1]
    assert len(resolver.asked) == 2  # once for each connection


def test_a_name_that_changes_between_look_up_and_connection_has_no_second_look_up() -> None:
    """DNS rebinding: the second answer is this machine, and is never used for the connection that was judged."""
    network, resolver = FakeNetwork(), FakeResolver(rebind_test=[[PUBLIC], ["127.0.0.1"]])
    assert refusal("http://rebind.test/", resolver, network) == "forbidden_address"
    assert network.connected == [(PUBLIC, 80)]  # robots.txt; the page's own look-up was judged again


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["169.254.169.254"], ["fd00:ec2::254"], ["::ffff:10.0.0.1"], [PUBLIC, "10.0.0.1"]]
)
def test_a_host_of_which_any_address_is_private_is_never_connected_to(addresses: list[str]) -> None:
    network = FakeNetwork()
    assert refusal("http://inside.test/", FakeResolver(inside_test=[addresses]), network) == "forbidden_address"
    assert network.connected == []


def test_a_redirect_is_judged_as_the_first_url_is() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://inside.test/admin\r\nContent-Length: 0\r\n\r\n"
    network = FakeNetwork({"/": moved})
    resolver = FakeResolver(site_test=[[PUBLIC]], inside_test=[["192.168.1.1"]])
    assert refusal("http://site.test/", resolver, network) == "forbidden_address"
    assert {address for address, _ in network.connected} == {PUBLIC}


def test_a_dead_address_gives_way_to_the_next_of_the_same_answer() -> None:
    network = FakeNetwork(dead=[OTHER_PUBLIC])
    assert fetch("http://site.test/", FakeResolver(site_test=[[OTHER_PUBLIC, PUBLIC]]), network).body == b"ok"
    dead = FakeNetwork(dead=[PUBLIC])
    assert refusal("http://site.test/", FakeResolver(site_test=[[PUBLIC]]), dead) == "no_connection"


def test_proxies_and_passwords_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    network = FakeNetwork()
    fetch("http://site.test/", FakeResolver(site_test=[[PUBLIC]]), network)
    assert {address for address, _ in network.connected} == {PUBLIC}
    assert all(b"authorization" not in sent.lower() and b"cookie" not in sent.lower() for sent in network.sent)


FORBIDDEN = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.1",
    "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.127.255.255", "192.0.0.8", "192.0.2.1", "198.18.0.1",
    "198.51.100.7", "203.0.113.7", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "3fff::1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "2002:7f00:1::1", "2002:808:808::1", "2001:0:1::1",
    "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "100::1", "not an address", "",
]  # fmt: skip
PUBLIC_ADDRESSES = [
    "8.8.8.8", "93.184.216.34", "172.32.0.1", "100.128.0.1", "192.0.1.1", "2606:4700::1111", "64:ff9b::8.8.8.8",
]  # fmt: skip


def test_only_an_address_of_the_internet_is_public() -> None:
    assert [address for address in FORBIDDEN + PUBLIC_ADDRESSES if is_public(address)] == PUBLIC_ADDRESSES
