"""Connections to public addresses only, whatever a name resolves to and however often it changes.

A host's name is resolved once for a connection, all its addresses are judged, and the connection goes to exactly one
of those: no second look-up can give another (DNS rebinding). TLS and the Host header still have the host's name, since
httpcore takes both from the URL. Every request makes a connection of its own, so every redirect is judged anew.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import httpcore

from replug.web.addresses import is_public
from replug.web.fetch_failure import FetchFailed

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
