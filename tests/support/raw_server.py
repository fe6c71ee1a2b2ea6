"""A server on loopback that answers with the very bytes a test gives it, well formed or not."""

import json
import socket
import threading
from collections.abc import Callable

from tests.support.fault_server import MODEL

MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


def http_answer(content: object, *headers: str, status: str = "200 OK") -> bytes:
    """An answer with this content: bytes as they are, anything else as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class RawServer:
    """`answer(number, payload)` gives the bytes for completion `number`; `models` are those for `GET /models`.

    Serves from threads while the `with` block lasts. `connections` counts those that were opened.
    """

    def __init__(self, answer: Callable[[int, dict], bytes], models: bytes | None = None) -> None:
        self._answer, self._models = answer, models or http_answer(MODELS)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.connections = self.requests = 0
        self.heads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __enter__(self) -> "RawServer":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while head := self._head(lines):
                    connection.sendall(self._bytes(head, lines))
            except OSError:  # the client left
                return

    def _head(self, lines: object) -> str:
        found = b""
        while not found.endswith(b"\r\n\r\n"):
            line = lines.readline()  # type: ignore[attr-defined]
            if not line:
                return ""
            found += line
        self.heads.append(found.decode("latin-1"))
        return self.heads[-1]

    def _bytes(self, head: str, lines: object) -> bytes:
        if head.startswith("GET"):
            return self._models
        length = next(line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length"))
        payload = json.loads(lines.read(int(length)))  # type: ignore[attr-defined]
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
        return self._answer(number, payload)
