"""A model hub on loopback, as far as a push needs it: repositories, commits, large files by git-lfs' basic transfer.

It keeps what was committed, and refuses as the hub does: a token that is none by 401, an owner who is another by 403,
a name that is taken by 409. Xet's protocol it does not speak.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER, TOKEN = "somebody", "hf_of_somebody"
COMMIT = "0" * 40
LARGE = ".safetensors"


@dataclass
class Repository:
    is_private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    tags: list[str] = field(default_factory=list)


class HubServer:
    """Serves at `url` while the `with` block lasts. `breaks_at` is a part of a path that answers 500."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.cards: list[str] = []
        self.breaks_at: str | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if self.breaks_at and self.breaks_at in path:
            return 500, {"error": "the hub is out of order"}
        for route, does in ROUTES.items():
            if found := re.fullmatch(route, f"{method} {path}"):
                return does(self, body, *found.groups())
        return 404, {"error": f"this hub has no {method} {path}"}

    def create(self, body: bytes) -> tuple[int, Any]:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != OWNER:
            return 403, {"error": f"you may not create under {asked['organization']}"}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo"}
        self.repositories[name] = Repository(asked["visibility"] == "private")
        return 200, {"url": f"{self.url}/{name}"}

    def info(self, body: bytes, name: str) -> tuple[int, Any]:
        one = self.repositories[name]
        files = [{"rfilename": file} for file in one.files]
        return 200, {"id": name, "private": one.is_private, "tags": one.tags, "siblings": files}

    def tree(self, body: bytes, name: str) -> tuple[int, Any]:
        files = self.repositories[name].files
        return 200, [{"type": "file", "path": path, "size": len(files[path]), "oid": COMMIT} for path in files]

    def validate(self, body: bytes) -> tuple[int, Any]:
        self.cards.append(json.loads(body)["content"])
        return 200, {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str) -> tuple[int, Any]:
        modes = {of["path"]: "lfs" if of["path"].endswith(LARGE) else "regular" for of in json.loads(body)["files"]}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        return 200, {"files": files}

    def lfs_batch(self, body: bytes, name: str) -> tuple[int, Any]:
        objects = json.loads(body)["objects"]
        actions = [{**of, "actions": {"upload": {"href": f"{self.url}/lfs/{of['oid']}"}}} for of in objects]
        return 200, {"transfer": "basic", "objects": actions}

    def lfs_put(self, body: bytes, oid: str) -> tuple[int, Any]:
        assert hashlib.sha256(body).hexdigest() == oid
        self.large[oid] = body
        return 200, {}

    def commit(self, body: bytes, name: str) -> tuple[int, Any]:
        files = self.repositories[name].files
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.repositories[name].tags = re.findall(r"^- ([\w-]+)$", files["README.md"].decode().split("---")[1], re.M)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}


ROUTES = {
    r"POST /api/repos/create": HubServer.create,
    r"GET /api/models/(.+/.+)/tree/main.*": HubServer.tree,
    r"GET /api/models/(.+/.+)": HubServer.info,
    r"POST /api/validate-yaml": HubServer.validate,
    r"POST /api/models/(.+/.+)/preupload/main": HubServer.preupload,
    r"POST /(.+/.+).git/info/lfs/objects/batch": HubServer.lfs_batch,
    r"PUT /lfs/(\w+)": HubServer.lfs_put,
    r"POST /api/models/(.+/.+)/commit/main": HubServer.commit,
}


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            knows = self.path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            refused = 401, {"error": "Invalid credentials in Authorization header"}
            status, content = hub.answer(self.command, self.path, body) if knows else refused
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: object) -> None:
            pass

    return Handler
