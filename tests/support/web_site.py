"""A web site on loopback, with honest pages, hostile ones, and a SearXNG-compatible search in front of them.

What a path answers is a function that gets the connection: hostile pages break HTTP itself, so nothing stands between.
`requests` counts what was asked for, so that a test need not believe its client.
"""

import functools
import gzip
import html
import json
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from replug.data.records import Document
from replug.index_workers.bm25 import search_bm25
from replug.web.fetch import FetchLimits

QUICK = FetchLimits(seconds=1.5, seconds_to_wait=20.0, max_bytes=2**19, delay_seconds=0.0)
MENU = "".join(f'<li><a href="/section{number}">Section {number}</a></li>' for number in range(12))
FOOTER = "Imprint of the menu keepers. Cookies. All rights reserved by the footer company."


@dataclass(frozen=True, slots=True)
class Request:
    target: str
    headers: dict[str, str]

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}


Send = Callable[[bytes], None]
Route = Callable[[Send, Request], None]


class WebSite:
    """Serves `routes` by path at 127.0.0.1:`port`; a path that is none is a 404."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.requests: Counter[str] = Counter()
        self.seen: list[Request] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.site = self
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def exempt(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", self.port)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    site: WebSite


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline().split()
        if len(line) < 2:
            return  # a connection that was given up before it asked
        target = line[1].decode("ascii")
        lines = iter(lambda: self.rfile.readline().strip().decode("latin-1"), "")
        request = Request(target, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)})
        site: WebSite = self.server.site  # type: ignore[attr-defined]
        path = urlsplit(target).path
        site.requests[path] += 1
        site.seen.append(request)
        try:
            site.routes.get(path, answer(b"", "404 Not Found"))(self.wfile.write, request)
        except OSError:
            return  # whoever asked has gone


@contextmanager
def web_site() -> Iterator[WebSite]:
    site = WebSite()
    try:
        yield site
    finally:
        site.close()


def answer(body: bytes, status: str = "200 OK", content_type: str = "text/html", more: Sequence[str] = ()) -> Route:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *more]
    return lambda send, request: send("\r\n".join([*head, "Connection: close", "", ""]).encode() + body)


def redirect(target: str, status: str = "302 Found") -> Route:
    return answer(b"", status, more=[f"Location: {target}"])


def article(title: str, text: str) -> bytes:
    """A page of a real passage, with a menu and a footer round it."""
    parts = "".join(f"<p>{html.escape(part)}</p>" for part in text.splitlines() if part.strip())
    return (
        f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>{html.escape(title)}</title></head><body>"
        f"<header><nav><ul>{MENU}</ul></nav></header><main><article><h1>{html.escape(title)}</h1>{parts}</article>"
        f"</main><footer><p>{FOOTER}</p></footer></body></html>"
    ).encode()


def searxng(site: WebSite, documents: Sequence[Document], per_page: int = 10) -> Route:
    """A search over the site's pages by BM25; a document's id is its page's path."""
    texts = [document.text for document in documents]

    def search(send: Send, request: Request) -> None:
        start = (int(request.query["pageno"]) - 1) * per_page
        rows, scores = search_bm25(lambda: texts, [request.query["q"]], start + per_page)
        ids = [documents[row].id for row, score in zip(rows[0], scores[0], strict=True) if score > 0][start:]
        results = [{"url": site.url + one, "title": one, "engine": "stand-in"} for one in ids]
        answer(json.dumps({"results": results}).encode(), content_type="application/json")(send, request)

    return search


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n"


def _endless(send: Send, request: Request) -> None:
    send(HEAD + b"\r\n<html><body>")
    while True:
        send(b"<p>" + b"word " * 10_000 + b"</p>")


def _endless_header(send: Send, request: Request) -> None:
    send(HEAD + b"X-Filler: ")
    for _ in range(2**14):  # 1 GiB
        send(b"x" * 2**16)


def _many_headers(send: Send, request: Request) -> None:
    send(HEAD)
    for number in range(2**26):
        send(b"X-%d: y\r\n" % number * 100)


def _endless_hints(send: Send, request: Request) -> None:
    while True:
        send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100)


def _drip(send: Send, request: Request) -> None:
    send(HEAD + b"\r\n<html><body>")
    while True:
        send(b"a")
        time.sleep(0.05)


def _silent(send: Send, request: Request) -> None:
    time.sleep(30)


def _broken_off(send: Send, request: Request) -> None:
    send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000\r\n\r\n<html><body><p>Half")


SCRIPT_ONLY = b"<html><head><script>document.write('text')</script></head><body><script>go()</script></body></html>"
MANY_ATTRIBUTES = "<html><body><p " + " ".join(f"a{number}=b" for number in range(45_000)) + ">x</p></body></html>"


@functools.cache  # a second to make
def _bomb() -> bytes:
    return gzip.compress(b"<html><body>" + b"0" * 2**28, 9)


def hostile_pages(site: WebSite) -> dict[str, str]:
    """Adds them to the site; the reason in which each ends, by path."""
    pages: dict[str, tuple[Route, str]] = {
        "/endless": (_endless, "too_large"),
        "/endless_header": (_endless_header, "broken_connection"),
        "/many_headers": (_many_headers, "broken_connection"),
        "/endless_hints": (_endless_hints, "timeout"),
        "/drip": (_drip, "timeout"),
        "/silent": (_silent, "timeout"),
        "/broken_off": (_broken_off, "broken_connection"),
        "/no_http": (lambda send, request: send(b"\0\1\2 hello\r\n\r\n"), "broken_connection"),
        "/loop": (redirect("/loop_back"), "too_many_redirects"),
        "/loop_back": (redirect("/loop"), "too_many_redirects"),
        "/nowhere": (answer(b"", "302 Found"), "status_302"),
        "/to_file": (redirect("file:///etc/passwd"), "url_forbidden"),
        "/to_ftp": (redirect("ftp://example.org/x"), "url_forbidden"),
        "/to_password": (redirect("http://user:secret@example.org/"), "url_forbidden"),
        "/to_port": (redirect("http://example.org:22/"), "url_forbidden"),
        "/to_metadata": (redirect("http://169.254.169.254/latest/meta-data/"), "forbidden_address"),
        "/to_loopback_name": (redirect("http://localhost/"), "forbidden_address"),
        "/to_loopback_number": (redirect("http://2130706433/"), "forbidden_address"),
        "/to_mapped": (redirect("http://[::ffff:127.0.0.1]/"), "forbidden_address"),
        "/gzip_bomb": (answer(_bomb(), more=["Content-Encoding: gzip"]), "too_large"),
        "/gzip_twice": (answer(gzip.compress(_bomb()), more=["Content-Encoding: gzip, gzip"]), "content_encoding"),
        "/gzip_half": (answer(gzip.compress(b"x" * 999)[:-9], more=["Content-Encoding: gzip"]), "content_encoding"),
        "/brotli": (answer(b"<html>", more=["Content-Encoding: br"]), "content_encoding"),
        "/pdf": (answer(b"%PDF-1.7", content_type="application/pdf"), "content_type"),
        "/no_type": (lambda send, request: send(b"HTTP/1.1 200 OK\r\n\r\n<html>"), "content_type"),
        "/failing": (answer(b"", "500 Internal Server Error"), "status_500"),
        "/script_only": (answer(SCRIPT_ONLY), "no_text"),
        "/empty": (answer(b""), "no_text"),
        "/binary": (answer(bytes(range(128, 256)) * 400, content_type="text/html; charset=utf-8"), "encoding"),
        "/many_attributes": (answer(MANY_ATTRIBUTES.encode()), "extraction_timeout"),
    }
    for number in range(9):
        pages[f"/far{number}"] = (redirect(f"/far{number + 1}"), "too_many_redirects" if number < 4 else "status_404")
    site.routes |= {path: route for path, (route, _) in pages.items()}
    return {path: reason for path, (_, reason) in pages.items()}
