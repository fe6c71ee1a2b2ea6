"""Which URLs and addresses a page may be fetched from: public ones only, however they are written.

A page, a redirect or a name server can name any address: the metadata server of a cloud, a router, this machine.
So it is decided by what an address is. IPv6 is refused but for global unicast (2000::/3) without the parts of it that
carry or stand for something else; that leaves out loopback, link-local (fe80::/10), unique local (fc00::/7, with the
metadata address fd00:ec2::254), multicast, and IPv4 addresses in another form, such as ::ffff:127.0.0.1. NAT64
(64:ff9b::/96) is judged by the IPv4 address inside, since a network without IPv4 reaches all of IPv4 by it. The lists
are IANA's registries of special-purpose addresses.

A host's name is resolved once for a connection, all its addresses are judged, and the connection goes to exactly one
of those: no second look-up can give another (DNS rebinding). TLS and the Host header still have the host's name, since
httpcore takes both from the URL. Every request makes a connection of its own, so every redirect is judged anew.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any
from urllib.parse import urldefrag

import httpcore
import httpx


class FetchFailed(Exception):
    """A page that gives nothing. `reason` is counted; it holds nothing of the page's own words but a status."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


NOT_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by a provider's customers (CGNAT)
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, with the metadata servers of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks of networks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, with Teredo, which carries IPv4
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries IPv4
        "3fff::/20",  # documentation
    )
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
METADATA_V4 = ipaddress.IPv4Address("168.63.129.16")  # Azure's, which is a public address by its number


def is_public(address: str) -> bool:
    """Whether a numeric address is one of the public internet; False for what is no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_public_v4(parsed)
    if parsed in NAT64:
        return _is_public_v4(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    return parsed in GLOBAL_V6 and not any(parsed in network for network in NOT_PUBLIC_V6)


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return address != METADATA_V4 and not any(address in network for network in NOT_PUBLIC_V4)


PORTS = {"http": 80, "https": 443}
LONGEST = 4096  # characters


def parse_url(url: str) -> httpx.URL | None:
    """None for what is no URL of a web page. The part after # names a place in a page and goes."""
    try:
        parsed = httpx.URL(urldefrag(url).url) if len(url) <= LONGEST else None
        return parsed if parsed is not None and parsed.host else None
    except (httpx.InvalidURL, ValueError):  # ValueError: brackets that hold no address
        return None


def host_port(url: httpx.URL) -> tuple[str, int]:
    return url.raw_host.decode("ascii"), url.port or PORTS.get(url.scheme, 0)


def url_problem(url: httpx.URL, exempt: Collection[tuple[str, int]]) -> str | None:
    """The reason why it is not asked for, None where it may be: http or https, no password, the scheme's own port."""
    if url.scheme not in PORTS:
        return "url_scheme"
    if url.userinfo:
        return "url_password"
    if host_port(url)[1] != PORTS[url.scheme] and host_port(url) not in exempt:
        return "url_port"
    return None


def is_of_host(url: str, hosts: Iterable[str]) -> bool:
    """Whether a URL is of one of these hosts, or of a host below one."""
    parsed = parse_url(url)
    name = "" if parsed is None else parsed.raw_host.decode("ascii").rstrip(".").lower()
    return any(name == host or name.endswith(f".{host}") for host in hosts)


Resolve = Callable[[str, int], Awaitable[list[str]]]
HostPort = tuple[str, int]


async def system_addresses(host: str, port: int) -> list[str]:
    """Addresses by the system's resolver, in its order. Raises FetchFailed."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that no name may have
        raise FetchFailed("unknown_host") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to public addresses, and to the `exempt` pairs of host and port, which the caller knows to be its own.

    `resolve` gives the addresses of a host; `network` makes the connection to one.
    """

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
        """Raises FetchFailed for a host of which any address is not public, and where none can be connected to."""
        addresses = await self._resolve(host, port)
        if (host, port) not in self._exempt and not all(map(is_public, addresses)):
            raise FetchFailed("forbidden_address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue  # the next of the same answer, all of which are judged
        raise FetchFailed("no_connection")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise FetchFailed("forbidden_address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
