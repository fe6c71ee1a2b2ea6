"""Fetch pages from public addresses of the web, within limits; failures have a reason.

A page, a redirect or a name server can name any address: a cloud's metadata server, a router, this machine. So the
parsed address is checked (IANA's registries of special-purpose addresses), not its spelling; for NAT64 the IPv4 address
inside. A host name is resolved once per connection, all its addresses are checked, and the connection goes to one of
them, so that no second look-up can give another (DNS rebinding). TLS and the Host header still use the name. Every
request opens a new connection, and redirects are followed here, so that each is checked like the first URL. No proxy,
password or cookie is used.

A page may be endless, slow, or compressed a thousandfold, so its time, bytes, header and redirects are bounded. A host
gets one request at a time, with a pause between. Without a robots.txt everything is allowed; if it cannot be read,
nothing is (RFC 9309).
"""

import asyncio
import ipaddress
import re
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any
from urllib.parse import urldefrag

import httpcore
import httpx
from protego import Protego

from replug.web.extraction import ACCEPTED, FetchFailed, unpacked

# Addresses -----------------------------------------------------------------------------------------------------------

# Relays, tunnels and a cloud's metadata server (168.63.129.16), which `ipaddress` calls global.
NOT_PUBLIC = [
    ipaddress.ip_network(one)
    for one in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "2001::/23", "2002::/16", "3fff::/20")
]
GLOBAL_V6, NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether a numeric address belongs to the public internet; False for other texts."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed in NAT64:
        parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    is_routed = parsed.version == 4 or parsed in GLOBAL_V6
    is_special = parsed.is_multicast or any(parsed in network for network in NOT_PUBLIC)
    return parsed.is_global and is_routed and not is_special


PORTS = {"http": 80, "https": 443}
MAX_URL_CHARACTERS = 4096
HostPort = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[list[str]]]


def parse_url(url: str) -> httpx.URL | None:
    """Return a URL without its fragment; None if it is not the URL of a web page."""
    try:
        parsed = httpx.URL(urldefrag(url).url) if len(url) <= MAX_URL_CHARACTERS else None
        return parsed if parsed is not None and parsed.host else None
    except (httpx.InvalidURL, ValueError):  # ValueError: brackets that hold no address
        return None


def url_problem(url: httpx.URL, exempt: Collection[HostPort]) -> str | None:
    """Return why a URL is not allowed, or None. Allowed: http and https, no password, the scheme's default port."""
    if url.scheme not in PORTS:
        return "url_scheme"
    if url.userinfo:
        return "url_password"
    host_port = url.raw_host.decode("ascii"), url.port or PORTS[url.scheme]
    if host_port[1] != PORTS[url.scheme] and host_port not in exempt:
        return "url_port"
    return None


async def system_addresses(host: str, port: int) -> list[str]:
    """Resolve a host by the system's resolver, in its order. Raises FetchFailed."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid label
        raise FetchFailed("unknown_host") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in addresses))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connect to public addresses, and to the `exempt` pairs of host and port, the caller's own servers."""

    def __init__(
        self,
        exempt: Collection[HostPort] = (),
        resolve: Resolve = system_addresses,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._exempt, self._resolve = frozenset(exempt), resolve
        self._network = network or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the host. Raises FetchFailed if any of its addresses is not public, or none accepts."""
        addresses = await self._resolve(host, port)
        if (host, port) not in self._exempt and not all(map(is_public, addresses)):
            raise FetchFailed("forbidden_address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue  # try the next address of the same look-up
        raise FetchFailed("no_connection")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# Pages ---------------------------------------------------------------------------------------------------------------

AGENT = "replug"  # our name in a robots.txt
ROBOTS_MAX_BYTES = 512_000  # RFC 9309 requires 500 KiB at least
CONTENT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
USER_AGENT_LINE = re.compile(r"(\s*user[-\s]*agent[\s:]+)(.*)", re.IGNORECASE)
REDIRECTS = (301, 302, 303, 307, 308)
USER_AGENT = f"{AGENT}/{version('replug')} (reads pages to answer questions; heeds robots.txt)"
HEADERS = [
    (b"User-Agent", USER_AGENT.encode("ascii")),
    (b"Accept", ", ".join(CONTENT_TYPES).encode("ascii")),
    (b"Accept-Encoding", ACCEPTED.encode("ascii")),
]


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The limits of a page, and the number of `pages_at_once`. Delays are between two requests to one host."""

    seconds: float = 20.0
    seconds_to_wait: float = 180.0  # including the wait for its turn and all redirects
    max_bytes: int = 4 * 2**20  # compressed and decompressed
    redirects: int = 5
    pages_at_once: int = 8
    delay_seconds: float = 0.5
    longest_delay_seconds: float = 10.0  # sites with a longer crawl delay are skipped


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A response with its decompressed body. A redirect has its target in `location` and no body."""

    url: str
    status: int
    content_type: str
    body: bytes
    location: str | None = None


class Fetcher:
    """Fetch pages that robots.txt allows. `exempt` pairs of host and port may have any address and port.

    It remembers the rules of each origin and the time of the next request to each host. `session` opens it for one
    event loop.
    """

    def __init__(
        self,
        limits: FetchLimits = FetchLimits(),
        exempt: Collection[HostPort] = (),
        resolve: Resolve = system_addresses,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._limits, self._exempt = limits, frozenset(exempt)
        self._backend = GuardedBackend(self._exempt, resolve, network)
        self._certificates = httpx.create_ssl_context(trust_env=False)
        self._robots: dict[str, Protego | None] = {}  # by origin; None if it could not be read
        self._next_turns: dict[str, float] = defaultdict(float)

    @asynccontextmanager
    async def session(self) -> AsyncIterator["Fetcher"]:
        """Open the fetcher for concurrent calls of `fetch`."""
        self._places = asyncio.Semaphore(self._limits.pages_at_once)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by host, and by robots.txt URL
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._certificates,
            max_connections=self._limits.pages_at_once,
            max_keepalive_connections=0,
            network_backend=self._backend,
        ) as self._pool:
            yield self

    async def fetch(self, url: str) -> Downloaded:
        """Fetch a page, or raise FetchFailed, within `seconds_to_wait`."""
        try:
            async with asyncio.timeout(self._limits.seconds_to_wait):
                return await self._follow(url)
        except TimeoutError as error:
            raise FetchFailed("no_turn") from error

    async def _follow(self, url: str, is_page: bool = True) -> Downloaded:
        """Follow redirects within one shared time limit; robots.txt itself is read without rules."""
        seen: set[str] = set()
        seconds = self._limits.seconds
        while url not in seen:
            if len(seen) > self._limits.redirects:
                raise FetchFailed("too_many_redirects")
            seen.add(url)
            parsed = parse_url(url)
            if parsed is None or (problem := url_problem(parsed, self._exempt)):
                raise FetchFailed("url_invalid" if parsed is None else str(problem))
            if is_page:
                await self._check_robots(parsed)
            answer, took = await self._ask(parsed, seconds, is_page)
            seconds -= took
            if answer.location is None:
                return answer
            try:
                url = str(parsed.join(answer.location))
            except (httpx.InvalidURL, ValueError) as error:
                raise FetchFailed("url_invalid") from error
        raise FetchFailed("redirect_loop")

    async def _check_robots(self, url: httpx.URL) -> None:
        """Raise FetchFailed if the rules of the URL's origin, which are fetched once, forbid it."""
        origin = _robots_url(url)
        async with self._locks[origin]:
            if origin not in self._robots:
                self._robots[origin] = await self._read_robots(origin)
        rules = self._robots[origin]
        if rules is None:
            raise FetchFailed("robots_unreadable")
        if not rules.can_fetch(str(url), AGENT):
            raise FetchFailed("robots")
        if float(rules.crawl_delay(AGENT) or 0.0) > self._limits.longest_delay_seconds:
            raise FetchFailed("crawl_delay")

    async def _read_robots(self, url: str) -> Protego | None:
        try:
            answer = await self._follow(url, is_page=False)
        except FetchFailed as failure:
            if failure.reason in ("forbidden_address", "unknown_host", "no_connection"):
                raise  # the page itself would fail for the same reason
            return None
        if 200 <= answer.status < 300:
            return parse_robots(answer.body.decode("utf-8-sig", errors="replace"))
        return Protego.parse("") if 400 <= answer.status < 500 else None

    async def _ask(self, url: httpx.URL, seconds: float, is_page: bool) -> tuple[Downloaded, float]:
        """Wait for the host's turn and a free place; return the response and the seconds it took."""
        async with self._locks[url.host]:
            await asyncio.sleep(self._next_turns[url.host] - time.monotonic())
            async with self._places:
                begun = time.monotonic()
                try:
                    async with asyncio.timeout(max(0.0, seconds)):
                        return await self._request(url, is_page), time.monotonic() - begun
                except TimeoutError as error:
                    raise FetchFailed("timeout") from error
                except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                    raise FetchFailed(_reason(error)) from error
                finally:
                    rules = self._robots.get(_robots_url(url))
                    asked_for = float(rules.crawl_delay(AGENT) or 0.0) if rules else 0.0
                    self._next_turns[url.host] = time.monotonic() + max(self._limits.delay_seconds, asked_for)

    async def _request(self, url: httpx.URL, is_page: bool) -> Downloaded:
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with self._pool.stream("GET", target, headers=[*HEADERS, (b"Host", url.netloc)]) as response:
            headers = httpx.Headers(response.headers)
            answer = Downloaded(str(url), response.status, headers.get("Content-Type", ""), b"")
            if response.status in REDIRECTS:
                if "Location" not in headers:
                    raise FetchFailed("redirect_nowhere")
                return replace(answer, location=headers["Location"])
            if is_page:
                if answer.status != httpx.codes.OK:
                    raise FetchFailed(f"status_{answer.status}")
                if answer.content_type.partition(";")[0].strip().lower() not in CONTENT_TYPES:
                    raise FetchFailed("content_type")
            elif response.status != httpx.codes.OK:
                return answer
            limit = self._limits.max_bytes if is_page else ROBOTS_MAX_BYTES
            return replace(answer, body=await self._body(response, headers, limit))

    async def _body(self, response: httpcore.Response, headers: httpx.Headers, limit: int) -> bytes:
        coding, body = headers.get("Content-Encoding", ""), bytearray()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > limit:
                raise FetchFailed("too_large")
        return unpacked(bytes(body), coding, limit)


def parse_robots(text: str) -> Protego:
    """Return the rules, with all other agents under one name.

    Protego copies rules to each agent of a group: thousands of names above thousands of rules would keep the event loop
    busy for minutes.
    """

    def ours(line: str) -> str:
        if (match := USER_AGENT_LINE.match(line)) is None:
            return line
        name = match[2].partition("#")[0].strip().lower()
        if name != "*":
            name = name.replace("*", "")
            name = name if name and name in AGENT else "another"
        return f"{match[1]}{name}"

    return Protego.parse("\n".join(map(ours, text.splitlines())))  # the same lines as Protego splits


def _robots_url(url: httpx.URL) -> str:
    return str(url.copy_with(raw_path=b"/robots.txt"))


def _reason(error: Exception) -> str:
    """Name a broken exchange; h11 marks an oversized header by its status, 431."""
    cause = error.__cause__ or error.__context__
    return "header_too_large" if getattr(cause, "error_status_hint", 0) == 431 else "broken_connection"
