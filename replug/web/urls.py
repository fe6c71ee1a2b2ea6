"""Which URLs may be asked for at all, and whose they are. Nothing is resolved or sent here."""

from collections.abc import Collection, Iterable
from urllib.parse import urldefrag

import httpx

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
