"""Who may ask, how much, and how many at once; pure ASGI, with an app that does what the test says."""

import asyncio

import pytest

from replug.config.errors import UserError
from replug.serving.batching import Metrics
from replug.serving.guard import GONE, VARIABLE, Guard, is_loopback, require_allowed, token_for
from replug.serving.requests import ApiError, ServingLimits

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert is_loopback(host)
    assert token_for(host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""])
def test_beyond_loopback_a_token_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"--host {host} can be reached by others; expected a token .*{VARIABLE}"):
        token_for(host)
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert token_for(host) == TOKEN


@pytest.mark.parametrize("token", ["", "short", "0123456789 abcdef", "0123456789abcdé", "0123456789abcdef\n"])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, token)
    with pytest.raises(UserError, match="is no token; expected 16") as caught:
        token_for("127.0.0.1")
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "é"]
)
def test_another_token_is_401(given: str | None) -> None:
    require_allowed(TOKEN, f"Bearer {TOKEN}", "example.org")
    require_allowed(TOKEN, f"bearer {TOKEN}", None)
    with pytest.raises(ApiError) as caught:
        require_allowed(TOKEN, given, "127.0.0.1")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "[::1]:8080", "localhost", "LOCALHOST:1"])
def test_without_a_token_the_host_is_this_machine(host: str) -> None:
    require_allowed(None, None, host.lower())
    for other in ("example.org", "127.0.0.1.example.org:8080", "", None):
        with pytest.raises(ApiError, match="expected this machine's own"):
            require_allowed(None, None, other)


# The guard ---------------------------------------------------------------------------------------------------------


class Client:
    """One request: what is received, and what came back. It goes when `goes` is set."""

    def __init__(self, path: str = "/search", body: bytes = b"{}", headers: dict[str, str] | None = None) -> None:
        given = {"host": "127.0.0.1", **(headers or {})}
        rows = [(name.encode(), value.encode()) for name, value in given.items()]
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": rows}
        self._parts = [body[start : start + 1000] for start in range(0, len(body), 1000)] or [b""]
        self.goes, self.sent = asyncio.Event(), []

    async def receive(self) -> dict:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.goes.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


class Inner:
    """Reads the body, waits until it may end, answers 200."""

    def __init__(self) -> None:
        self.may_end, self.read, self.cancelled = asyncio.Event(), [], 0

    async def __call__(self, scope, receive, send) -> None:
        self.read.append((await receive())["body"])
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def test_a_body_beyond_the_limit_is_413_whether_it_is_declared_or_not() -> None:
    async def test():
        inner = Inner()
        inner.may_end.set()
        guard = Guard(inner, None, ServingLimits(max_body_bytes=5000), Metrics())
        for client, status in (
            (Client(body=b"x" * 5000), 200),
            (Client(body=b"x" * 5001), 413),
            (Client(headers={"content-length": "5001"}), 413),
        ):
            await guard(client.scope, client.receive, client.send)
            assert client.status == status
        assert inner.read == [b"x" * 5000]

    asyncio.run(test())


def test_one_request_too_many_is_503_with_when_to_come_again() -> None:
    async def test():
        inner, metrics = Inner(), Metrics()
        guard = Guard(inner, None, ServingLimits(max_concurrency=2), metrics)
        clients = [Client() for _ in range(3)]
        tasks = [asyncio.create_task(guard(one.scope, one.receive, one.send)) for one in clients]
        await asyncio.sleep(0.01)
        assert clients[2].status == 503
        assert (b"retry-after", b"1") in clients[2].sent[0]["headers"]
        assert "replug_requests_under_way 2.0" in metrics.text().decode()
        health = Client("/health")
        tasks.append(asyncio.create_task(guard(health.scope, health.receive, health.send)))
        inner.may_end.set()
        await asyncio.gather(*tasks)
        assert [one.status for one in (*clients[:2], health)] == [200, 200, 200]
        assert 'replug_requests_total{route="/search",status="503"} 1.0' in metrics.text().decode()

    asyncio.run(test())


def test_a_client_that_goes_ends_its_work_and_frees_its_place() -> None:
    async def test():
        inner, metrics = Inner(), Metrics()
        guard = Guard(inner, None, ServingLimits(max_concurrency=1), metrics)
        gone = Client()
        task = asyncio.create_task(guard(gone.scope, gone.receive, gone.send))
        await asyncio.sleep(0.01)
        gone.goes.set()
        await task
        assert (inner.cancelled, gone.sent) == (1, [])
        assert f'status="{GONE}"' in metrics.text().decode()
        inner.may_end.set()
        next_one = Client()
        await guard(next_one.scope, next_one.receive, next_one.send)
        assert next_one.status == 200

    asyncio.run(test())


def test_all_but_health_is_behind_the_token_and_paths_make_no_new_metrics() -> None:
    async def test():
        inner, metrics = Inner(), Metrics()
        inner.may_end.set()
        guard = Guard(inner, TOKEN, ServingLimits(), metrics)
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401), ("/nothing/7", 401)):
            client = Client(path)
            await guard(client.scope, client.receive, client.send)
            assert client.status == status
        assert "nothing" not in metrics.text().decode()
        assert 'route="other",status="401"' in metrics.text().decode()

    asyncio.run(test())
