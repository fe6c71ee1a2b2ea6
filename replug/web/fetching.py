"""Pages from the web, each within its limits, or the reason why not.

A page is a stranger's: it may be endless, slow, compressed a thousandfold, or lead to this machine. So everything is
bounded: a page's time from the first look-up to the last byte, its bytes as sent and as unpacked, its header (100 KiB,
httpcore's bound), its redirects, and how long it may wait for its turn. Redirects are followed here, so that each is
judged as the first URL was. No proxy, password or cookie is sent, and nothing of the environment is read.

A host is asked one thing at a time with a pause between, or with the one that its robots.txt asks for. Where there is
no robots.txt all is allowed, where it cannot be read nothing is (RFC 9309). Its rules are kept in memory for a day;
`protego` reads them, which knows wildcards and the longest match.

A body is taken out of gzip or deflate, one layer of it, only as far as the limit leaves room: a bomb takes no more
memory than an honest page.
"""

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

import httpcore
import httpx
from protego import Protego

from replug.web.network import FetchFailed, GuardedBackend, HostPort, Resolve, parse_url, system_addresses, url_problem

ACCEPTED = "gzip, deflate"
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ZLIB_HEADER = 0x8  # the low bits of the first byte; some servers send deflate without a header


class BoundedBody:
    """Bytes of one body, at most `limit` of them. Raises FetchFailed where there are more, or they are damaged."""

    def __init__(self, coding: str, limit: int) -> None:
        self._coding, self._limit = coding.strip().lower(), limit
        if self._coding not in ("", "identity", *WINDOW_BITS):
            raise FetchFailed("content_encoding")
        self._decoder = zlib.decompressobj(WINDOW_BITS[self._coding]) if self._coding in WINDOW_BITS else None
        self._decoded = bytearray()
        self._is_begun = False

    def feed(self, piece: bytes) -> None:
        try:
            self._decoded += self._decompressed(piece) if self._decoder else piece
        except zlib.error as error:
            raise FetchFailed("content_encoding") from error
        if len(self._decoded) > self._limit:
            raise FetchFailed("too_large")

    def finish(self) -> bytes:
        """All of it. Raises FetchFailed where the body broke off."""
        if self._decoder and self._is_begun and not self._decoder.eof:
            raise FetchFailed("incomplete")
        return bytes(self._decoded)

    def _decompressed(self, piece: bytes) -> bytes:
        """Read as much as the limit leaves room for, and one byte more."""
        if piece and not self._is_begun:
            self._is_begun = True
            if self._coding == "deflate" and piece[0] & 0x0F != ZLIB_HEADER:
                self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        room, out = self._limit + 1 - len(self._decoded), bytearray()
        while piece and len(out) < room:  # zlib takes 0 for no limit
            assert self._decoder is not None
            if self._decoder.eof:  # gzip may be of several members
                self._decoder = zlib.decompressobj(WINDOW_BITS[self._coding])
            out += self._decoder.decompress(piece, room - len(out))
            piece = self._decoder.unused_data
        return bytes(out)


AGENT = "replug"  # what rules may name us by
MAX_BYTES = 512_000  # RFC 9309 asks for 500 KiB at least
SECONDS_KEPT = 86_400.0
ALLOW_ALL, ALLOW_NOTHING = "", "User-agent: *\nDisallow: /"


@dataclass(frozen=True, slots=True)
class RobotsRules:
    """Of one origin. `is_known` is False where they could not be read."""

    rules: Protego
    is_known: bool
    read_at: float

    @property
    def are_old(self) -> bool:
        return time.monotonic() - self.read_at > SECONDS_KEPT

    def refusal(self, url: str) -> str | None:
        """The reason why a URL is not read, None where it may be."""
        if self.rules.can_fetch(url, AGENT):
            return None
        return "robots" if self.is_known else "robots_unreadable"

    @property
    def crawl_delay(self) -> float:
        """Seconds between two requests that the site asks for; 0 where it asks for none."""
        return max(0.0, float(self.rules.crawl_delay(AGENT) or 0.0))


def robots_of(status: int | None, body: bytes) -> RobotsRules:
    """From what was answered to a request for robots.txt; a status of None is no answer."""
    if status is not None and 200 <= status < 300:
        return RobotsRules(Protego.parse(body.decode("utf-8", errors="replace")), True, time.monotonic())
    is_absent = status is not None and 400 <= status < 500
    return RobotsRules(Protego.parse(ALLOW_ALL if is_absent else ALLOW_NOTHING), is_absent, time.monotonic())


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
    """Of each page; `pages_at_once` of all together. Delays are between two requests to one host."""

    seconds: float = 20.0
    seconds_to_wait: float = 180.0  # for its turn, and all its redirects
    max_bytes: int = 4 * 2**20  # as sent, and as unpacked
    redirects: int = 5
    pages_at_once: int = 8
    delay_seconds: float = 0.5
    longest_delay_seconds: float = 10.0  # a site that asks for a longer one is not read


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What a server answered: the Content-Type header and the body unpacked.

    `url` is that after redirects. `location` is where a redirect leads, whose body is not read.
    """

    url: str
    status: int
    content_type: str
    body: bytes
    location: str | None = None


class Fetcher:
    """Fetches pages that robots.txt allows. `exempt` are pairs of host and port that may be any address and port.

    It remembers when each host was asked last, and its rules. `session` opens it for one event loop.
    """

    def __init__(
        self,
        limits: FetchLimits = FetchLimits(),
        exempt: Collection[HostPort] = (),
        resolve: Resolve = system_addresses,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self.limits, self.exempt = limits, frozenset(exempt)
        self.backend = GuardedBackend(self.exempt, resolve, network)
        self.certificates = httpx.create_ssl_context(trust_env=False)
        self.robots: dict[str, RobotsRules] = {}
        self.next_turns: dict[str, float] = defaultdict(float)

    @asynccontextmanager
    async def session(self) -> AsyncIterator["FetchSession"]:
        async with httpcore.AsyncConnectionPool(
            ssl_context=self.certificates,
            max_connections=self.limits.pages_at_once,
            max_keepalive_connections=0,
            network_backend=self.backend,
        ) as pool:
            yield FetchSession(self, pool)


class FetchSession:
    """A fetcher in one event loop, whose pages may be asked for at once."""

    def __init__(self, fetcher: Fetcher, pool: httpcore.AsyncConnectionPool) -> None:
        self._fetcher, self._pool, self._limits = fetcher, pool, fetcher.limits
        self._places = asyncio.Semaphore(fetcher.limits.pages_at_once)
        self._host_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._robots_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch(self, url: str) -> Downloaded:
        """Raises FetchFailed, within `seconds_to_wait`."""
        try:
            async with asyncio.timeout(self._limits.seconds_to_wait):
                return await self._follow(url)
        except TimeoutError as error:
            raise FetchFailed("no_turn") from error

    async def _follow(self, url: str, heeds_robots: bool = True) -> Downloaded:
        seen: set[str] = set()
        seconds = self._limits.seconds
        while url not in seen:
            if len(seen) > self._limits.redirects:
                raise FetchFailed("too_many_redirects")
            seen.add(url)
            parsed = self._checked(url)
            if heeds_robots:
                await self._check_robots(parsed)
            answer, took = await self._ask(parsed, seconds, heeds_robots)
            seconds -= took  # one time for a page with all its redirects
            if answer.location is None:
                return answer
            url = _joined(parsed, answer.location)
        raise FetchFailed("redirect_loop")

    def _checked(self, url: str) -> httpx.URL:
        parsed = parse_url(url)
        problem = "url_invalid" if parsed is None else url_problem(parsed, self._fetcher.exempt)
        if parsed is None or problem:
            raise FetchFailed(str(problem))
        return parsed

    async def _check_robots(self, url: httpx.URL) -> None:
        rules = await self._rules(url)
        reason = rules.refusal(str(url))
        if reason is None and rules.crawl_delay > self._limits.longest_delay_seconds:
            reason = "crawl_delay"
        if reason is not None:
            raise FetchFailed(reason)

    async def _rules(self, url: httpx.URL) -> RobotsRules:
        """Of the URL's origin, asked for once."""
        origin = str(url.copy_with(raw_path=b"/robots.txt"))
        async with self._robots_locks[origin]:
            known = self._fetcher.robots.get(origin)
            if known is None or known.are_old:
                known = self._fetcher.robots[origin] = await self._read_robots(origin)
        return known

    async def _read_robots(self, url: str) -> RobotsRules:
        try:
            found = await self._follow(url, heeds_robots=False)
        except FetchFailed as failure:
            if failure.reason in ("forbidden_address", "unknown_host", "no_connection"):
                raise  # as the page itself would
            return robots_of(None, b"")
        return robots_of(found.status, found.body)

    async def _ask(self, url: httpx.URL, seconds: float, is_page: bool) -> tuple[Downloaded, float]:
        """The answer and the seconds that it took, once it is the turn of the host and a place is free."""
        async with self._host_locks[url.host]:
            await asyncio.sleep(self._fetcher.next_turns[url.host] - time.monotonic())
            async with self._places:
                begun = time.monotonic()
                try:
                    return await self._exchange(url, seconds, is_page), time.monotonic() - begun
                finally:
                    self._fetcher.next_turns[url.host] = time.monotonic() + self._delay(url)

    def _delay(self, url: httpx.URL) -> float:
        rules = self._fetcher.robots.get(str(url.copy_with(raw_path=b"/robots.txt")))
        return max(self._limits.delay_seconds, rules.crawl_delay if rules else 0.0)

    async def _exchange(self, url: httpx.URL, seconds: float, is_page: bool) -> Downloaded:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await self._request(url, is_page)
        except TimeoutError as error:
            raise FetchFailed("timeout") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise FetchFailed(_reason(error)) from error

    async def _request(self, url: httpx.URL, is_page: bool) -> Downloaded:
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with self._pool.stream("GET", target, headers=[*HEADERS, (b"Host", url.netloc)]) as response:
            headers = httpx.Headers(response.headers)
            answer = Downloaded(str(url), response.status, headers.get("Content-Type", ""), b"")
            if response.status in REDIRECTS:
                return replace(answer, location=_location(headers))
            if is_page:
                # Raises FetchFailed for an answer whose body is not worth reading
                if answer.status != httpx.codes.OK:
                    raise FetchFailed(f"status_{answer.status}")
                if answer.content_type.partition(";")[0].strip().lower() not in CONTENT_TYPES:
                    raise FetchFailed("content_type")
            elif response.status != httpx.codes.OK:
                return answer
            limit = self._limits.max_bytes if is_page else MAX_BYTES
            return replace(answer, body=await self._body(response, headers, limit))

    async def _body(self, response: httpcore.Response, headers: httpx.Headers, limit: int) -> bytes:
        sent, body = 0, BoundedBody(headers.get("Content-Encoding", ""), limit)
        async for piece in response.aiter_stream():
            sent += len(piece)
            if sent > limit:
                raise FetchFailed("too_large")
            body.feed(piece)
        return body.finish()


def _location(headers: httpx.Headers) -> str:
    if "Location" not in headers:
        raise FetchFailed("redirect_nowhere")
    return headers["Location"]


def _joined(url: httpx.URL, location: str) -> str:
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError) as error:
        raise FetchFailed("url_invalid") from error


def _reason(error: Exception) -> str:
    """h11 knows a header that is too long by the status which would answer it in the other direction."""
    cause = error.__cause__ or error.__context__
    return "header_too_large" if getattr(cause, "error_status_hint", 0) == 431 else "broken_connection"
