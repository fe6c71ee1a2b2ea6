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
HostPort = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[list[str]]]


def allowed_url(url: str, exempt: Collection[HostPort], base: httpx.URL | None = None) -> httpx.URL:
    """Return a URL, relative to `base`, without its fragment.

    Raises FetchFailed unless it is http or https, without a password, at the scheme's default port or `exempt`.
    """
    try:
        parsed = (base or httpx.URL("")).join(urldefrag(url).url)
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: brackets that hold no address
        raise FetchFailed("url_invalid") from error
    port = PORTS.get(parsed.scheme)
    is_exempt = (parsed.raw_host.decode("ascii"), parsed.port) in exempt
    if port is None or not parsed.host or parsed.userinfo or (parsed.port not in (None, port) and not is_exempt):
        raise FetchFailed("url_forbidden")
    return parsed


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
# Protego copies the rules of a group to each of its agents: thousands of both would keep the event loop busy.
ROBOTS_MAX_COPIES = 300_000
CONTENT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
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

    seconds: float = 20.0  # of a request
    seconds_to_wait: float = 180.0  # including the wait for its turn and all redirects
    max_bytes: int = 4 * 2**20  # compressed and decompressed
    redirects: int = 5
    pages_at_once: int = 8
    delay_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A response with its decompressed body. A redirect has its target in `location` and no body."""

    url: str
    status: int
    content_type: str
    body: bytes = b""
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
        self._robots: dict[str, Protego | str] = {}  # by URL; or the reason why it could not be read
        self._next_turns: dict[str, float] = defaultdict(float)
        self._delays: dict[str, float] = defaultdict(lambda: limits.delay_seconds)  # by host

    @asynccontextmanager
    async def session(self) -> AsyncIterator["Fetcher"]:
        """Open the fetcher for concurrent calls of `fetch`."""
        self._places = asyncio.Semaphore(self._limits.pages_at_once)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by host, and by robots.txt URL
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._certificates, max_keepalive_connections=0, network_backend=self._backend
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
        """Follow redirects; robots.txt itself is read without rules."""
        parsed = allowed_url(url, self._exempt)
        for _ in range(self._limits.redirects + 1):
            if is_page:
                await self._check_robots(parsed)
            answer = await self._ask(parsed, is_page)
            if answer.location is None:
                return answer
            parsed = allowed_url(answer.location, self._exempt, parsed)
        raise FetchFailed("too_many_redirects")

    async def _check_robots(self, url: httpx.URL) -> None:
        """Raise FetchFailed if the rules of the URL's origin, which are fetched once, forbid it."""
        origin = str(url.copy_with(raw_path=b"/robots.txt"))
        async with self._locks[origin]:
            if origin not in self._robots:
                self._robots[origin] = await self._read_robots(origin)
        rules = self._robots[origin]
        if isinstance(rules, str):
            raise FetchFailed(rules)
        if not rules.can_fetch(str(url), AGENT):
            raise FetchFailed("robots")
        self._delays[url.host] = max(self._limits.delay_seconds, float(rules.crawl_delay(AGENT) or 0.0))

    async def _read_robots(self, url: str) -> Protego | str:
        """Return the rules, all allowed without a robots.txt, or the reason why it cannot be read."""
        try:
            answer = await self._follow(url, is_page=False)
        except FetchFailed as failure:
            return failure.reason
        lines = answer.body.decode("utf-8-sig", errors="replace").splitlines()
        copies = len(lines) * sum("agent" in line.lower() for line in lines)
        is_read = answer.status // 100 in (2, 4) and copies <= ROBOTS_MAX_COPIES
        return Protego.parse("\n".join(lines)) if is_read else "robots_unreadable"

    async def _ask(self, url: httpx.URL, is_page: bool) -> Downloaded:
        """Wait for the host's turn and a free place; return the response."""
        async with self._locks[url.host]:
            await asyncio.sleep(self._next_turns[url.host] - time.monotonic())
            async with self._places:
                try:
                    async with asyncio.timeout(self._limits.seconds):
                        return await self._request(url, is_page)
                except TimeoutError as error:
                    raise FetchFailed("timeout") from error
                except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                    raise FetchFailed("broken_connection") from error
                finally:
                    self._next_turns[url.host] = time.monotonic() + self._delays[url.host]

    async def _request(self, url: httpx.URL, is_page: bool) -> Downloaded:
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with self._pool.stream("GET", target, headers=[*HEADERS, (b"Host", url.netloc)]) as response:
            headers = httpx.Headers(response.headers)
            answer = Downloaded(str(url), response.status, headers.get("Content-Type", ""))
            if response.status in REDIRECTS and "Location" in headers:
                return replace(answer, location=headers["Location"])
            if response.status != httpx.codes.OK:
                if is_page:
                    raise FetchFailed(f"status_{answer.status}")
                return answer
            if is_page and answer.content_type.partition(";")[0].strip().lower() not in CONTENT_TYPES:
                raise FetchFailed("content_type")
            limit, body = self._limits.max_bytes if is_page else ROBOTS_MAX_BYTES, bytearray()
            async for piece in response.aiter_stream():
                body += piece
                if len(body) > limit:
                    raise FetchFailed("too_large")
            return replace(answer, body=unpacked(bytes(body), headers.get("Content-Encoding", ""), limit))
