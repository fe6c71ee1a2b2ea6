"""A name that resolves to a private address, at once or later, leads nowhere. Resolver and network are stand-ins."""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import pytest

from replug.web.extraction import FetchFailed
from replug.web.fetch import Downloaded, Fetcher, is_public
from tests.support.web_site import QUICK

PUBLIC, OTHER_PUBLIC = "93.184.216.34", "2606:4700::1111"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nok"
NO_ROBOTS = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class FakeStream(httpcore.AsyncNetworkStream):
    """Answers what it was made with, and remembers what was sent and whose certificate was asked for."""

    def __init__(self, network: "FakeNetwork", address: str) -> None:
        self._network, self._address, self._left = network, address, b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        given, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return given

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._network.sent += [buffer] if buffer else []
        if buffer.startswith(b"GET"):
            path = buffer.split()[1].decode()
            self._left = NO_ROBOTS if path == "/robots.txt" else self._network.answers.get(path, PAGE)

    async def aclose(self) -> None: ...

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
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

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        if host in self.dead:
            raise httpcore.ConnectError("dead")
        return FakeStream(self, host)


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


def redirect_to(target: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()


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
    network = FakeNetwork({"/": redirect_to("http://inside.test/admin")})
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


@pytest.mark.parametrize("address", FORBIDDEN)
def test_an_address_of_a_network_that_is_not_public_is_forbidden(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)
