"""Servers that pass the probe and go wrong after it, or mean harm: each is a fault or an error, none a wrong score."""

import gzip
import json
import math
import re
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from replug.config.errors import RunError, UserError
from replug.models.http import connection as server_connection
from replug.models.http.connection import ServerError
from replug.models.http.request_budget import RequestBudget
from replug.models.http.server_source import connect
from replug.models.local.stand_in_lm import StandInLM
from tests.models.conftest import Opened
from tests.support.fault_server import MODEL, FaultServer, server_spec
from tests.support.lm_answers import bits, texts_of

MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


def http_answer(content: object, *headers: str, status: str = "200 OK") -> bytes:
    """An answer with this content: bytes as they are, anything else as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class RawServer(ThreadingHTTPServer):
    """`answer(number, payload)` gives the bytes for completion `number`; `models` are those for `GET /models`.

    Serves from threads while the `with` block lasts.
    """

    def __init__(self, answer: Callable[[int, dict], bytes], models: bytes | None = None) -> None:
        super().__init__(("127.0.0.1", 0), RawHandler)
        self.answer, self.models, self.numbers = answer, http_answer(MODELS) if models is None else models, count()
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> "RawServer":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.socket.close()  # a thread may wait for a client that stays

    def handle_error(self, *_: object) -> None:
        """The client left."""


class RawHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RawServer

    def do_GET(self) -> None:
        self.wfile.write(self.server.models)

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(self.server.numbers)
        self.server.requests = number + 1
        self.wfile.write(self.server.answer(number, payload))

    def log_message(self, *_: object) -> None:
        """Tests show enough."""


SECRET = "sk-very-secret-1234"
PREFIXES, CONTINUATIONS = ["red boat was the", "the green boat"], [" new red", " blue of"]

Answer = Callable[[int, dict], bytes]


pytestmark = pytest.mark.usefixtures("two_attempts")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLUG_LM_API_KEY", SECRET)


@pytest.fixture
def asked(opened: Opened) -> Opened:
    return partial(opened, patience_minutes=1e-6, timeout_seconds=5.0)


def honest(payload: dict) -> dict:
    return FaultServer().body(payload)


RIGHT = bits(StandInLM().score(PREFIXES, CONTINUATIONS))


def test_the_answer_to_another_text_is_a_fault(asked: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 1)

    def answer_to_other(number: int, payload: dict) -> bytes:
        first, *others = payload["prompt"]
        return http_answer(honest(payload if number else payload | {"prompt": [first[::-1], *others]}))

    with RawServer(answer_to_other) as server:
        lm = asked(server, api="prompt_logprobs")
        with pytest.raises(RunError, match="not of the expected form"):
            lm.score(PREFIXES, CONTINUATIONS)
        assert bits(asked(server, api="prompt_logprobs").score(PREFIXES, CONTINUATIONS)) == RIGHT


def altered(change: Callable[[dict], object]) -> Answer:
    """The honest answer, changed in place from the first request on."""

    def answer(number: int, payload: dict) -> bytes:
        body = honest(payload)
        change(body)
        return http_answer(body)

    return answer


def with_huge_integers(body: dict) -> None:
    for choice in body["choices"]:
        choice["logprobs"]["token_logprobs"] = [None, *[-(10**400)] * (len(choice["logprobs"]["tokens"]) - 1)]


RAW_ANSWERS: dict[str, Answer] = {
    "huge integers": altered(with_huge_integers),
    "deep JSON": lambda n, p: http_answer(b"[" * 100_000 + b"]" * 100_000),
    "no choices": lambda n, p: http_answer({}),
    "not UTF-8": lambda n, p: http_answer(b'{"choices": "\xff\xfe"}'),
    "compressed": lambda n, p: http_answer(gzip.compress(json.dumps(honest(p)).encode()), "Content-Encoding: gzip"),
    "a dangling length": lambda n, p: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b" " * (20 << 20),
    "no HTTP": lambda n, p: b"SSH-2.0-OpenSSH_9.6\r\n",
    "endless headers": lambda n, p: b"HTTP/1.1 200 OK\r\n" + b"X-Pad: 0123456789\r\n" * 200_000,
}


@pytest.mark.parametrize("name", RAW_ANSWERS)
def test_an_answer_that_cannot_be_right_is_a_fault_that_ends_in_bounded_time(asked: Opened, name: str) -> None:
    begun = time.monotonic()
    with RawServer(RAW_ANSWERS[name]) as server:
        lm = asked(server, timeout_seconds=0.5)
        with pytest.raises(ServerError, match=r"did not answer in 2 attempts .*; last: ") as caught:
            lm.score(PREFIXES, CONTINUATIONS)
        assert len(str(caught.value)) < 700
        assert server.requests == 2
    assert time.monotonic() - begun < 60


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_small_answer_does_not_grow_and_a_large_one_is_not_read(
    asked: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 1)
    bomb = gzip.compress(bytes(300 << 20), 1)
    large = http_answer(b'{"choices": [' + b"[" * (30 << 20))
    before = peak_bytes()
    for content in (http_answer(bomb, "Content-Encoding: gzip"), large):
        begun = time.monotonic()
        with RawServer(lambda n, p, content=content: content) as server, pytest.raises(ServerError):  # type: ignore[misc]
            asked(server, timeout_seconds=3.0).score(PREFIXES, CONTINUATIONS)
        assert time.monotonic() - begun < 30
    assert peak_bytes() - before < 200 << 20  # beside what the test itself holds, and not the whole bomb


def quoted_in_values(body: dict) -> None:
    body["choices"][0]["logprobs"]["token_logprobs"][-2] = SECRET


KEY_ANSWERS: dict[str, Answer] = {
    "the reason": lambda n, p: http_answer({}, status=f"500 Bearer {SECRET}"),
    "a status line": lambda n, p: f"HTTP/9.9 {SECRET} {SECRET}\r\n\r\n".encode(),
    "a log-prob": altered(quoted_in_values),
    "escapes": lambda n, p: http_answer(b'{"error": "\\u0073k-very-secret-1234"}', status="400 Bad Request"),
    "upper case": lambda n, p: http_answer({"error": SECRET.upper()}, status="503 Busy"),
}


@pytest.mark.parametrize("where", KEY_ANSWERS)
def test_the_key_is_shown_in_no_message(asked: Opened, where: str) -> None:
    with RawServer(KEY_ANSWERS[where]) as server, pytest.raises(RunError) as caught:
        asked(server).score(PREFIXES, CONTINUATIONS)
    error: BaseException | None = caught.value
    while error is not None:  # a log shows the causes too
        assert SECRET not in f"{error} {error!r}".lower()
        error = error.__cause__


def test_the_listed_names_are_shown_for_an_unknown_one_without_the_key_and_without_escapes() -> None:
    names = [{"id": f"{SECRET}\x1b[31m"}, {"id": [[]]}, {"id": "x" * 5000}]
    unknown = http_answer({"message": "no such model"}, status="404 Not Found")
    with RawServer(lambda n, p: unknown, http_answer({"data": names})) as server, pytest.raises(UserError) as caught:
        connect(server_spec(server.url), RequestBudget(None))
    assert re.search(r"no such model; .* lm.model is words, the server lists", str(caught.value))
    assert SECRET not in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 900


CARD = MODELS["data"][0]
LISTS: dict[str, tuple[object, int | None]] = {  # what GET /models answers, and the longest input by that
    "vLLM": ({"data": [CARD | {"max_model_len": 2048}]}, 2047),
    "an endless length": ({"data": [CARD | {"max_model_len": float("inf")}]}, None),
    "a word for a length": ({"data": [CARD | {"max_model_len": "many"}]}, None),
    "another name": ({"data": [{"id": f"{MODEL}:latest"}]}, None),
    "null": ({"object": "list", "data": None}, None),
    "names": ([MODEL], None),
    "no JSON": (b"<html>models</html>", None),
}
NO_ANSWER = "no answer"
REFUSALS = ["404 Not Found", "302 Found"]


@pytest.mark.parametrize("name", [*LISTS, *REFUSALS, NO_ANSWER])
def test_the_list_of_models_decides_nothing_and_adds_what_it_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "SECONDS_TO_LIST_MODELS", 0.3)
    content, longest = LISTS.get(name, ({"detail": "no"}, None))
    models = http_answer(content, status=name if name in REFUSALS else "200 OK")
    with RawServer(lambda n, p: http_answer(honest(p)), b"" if name == NO_ANSWER else models) as server:
        lm = connect(server_spec(server.url), RequestBudget(None))
        assert lm.max_tokens == longest
        lm.close()


def test_a_redirect_is_not_followed(asked: Opened) -> None:
    def moved(number: int, payload: dict) -> bytes:
        return http_answer(b"", f"Location: {other.url}/completions?key={SECRET}", status="301 Moved")

    with RawServer(lambda n, p: http_answer(honest(p))) as other, RawServer(moved) as server:
        with pytest.raises(ServerError, match="refuses the request: 301 Moved"):
            asked(server).score(PREFIXES, CONTINUATIONS)
        assert other.requests == 0


def refusing(status: str, *headers: str, **error: object) -> Answer:
    return lambda number, payload: http_answer({"error": {"message": "no", **error}}, *headers, status=status)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusing("429 Too Many Requests", type="insufficient_quota", code=None), "refuses the request: 429"),
        (refusing("429 Too Many Requests", code="billing_hard_limit_reached"), "refuses the request: 429"),
        (refusing("402 Payment Required"), "refuses the request: 402"),
        (refusing("500 Error", "Retry-After: 7200"), r"asks to wait 2:00:00, too long \(lm.patience_minutes=15"),
    ],
)
def test_what_waiting_does_not_mend_is_not_waited_for(asked: Opened, answer: Answer, says: str) -> None:
    with RawServer(answer) as server:
        with pytest.raises(ServerError, match=says):
            asked(server, patience_minutes=15).score(PREFIXES, CONTINUATIONS)
        assert server.requests == 1


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-9999.0, -math.inf, math.nan, None, 1.0, "-1.5"])  # vLLM's -9999, OpenVINO's 1.0
def test_a_number_that_stands_for_no_log_prob_is_no_score(asked: Opened, api: str, value: object) -> None:
    def change(body: dict) -> None:
        for choice in body["choices"]:
            if api == "echo":
                choice["logprobs"]["token_logprobs"][-2] = value
            else:
                [shown] = choice["prompt_logprobs"][-1].values()
                shown["logprob"] = value

    with (
        RawServer(altered(change)) as server,
        pytest.raises(ServerError, match=r"log-probs? of .*the continuation"),
    ):
        asked(server, api=api).score(PREFIXES, CONTINUATIONS)


@pytest.mark.parametrize("total", [0, "7", 10**400])
def test_a_server_cannot_talk_the_budget_down_or_out(asked: Opened, total: object) -> None:
    usage = {"usage": {"total_tokens": total}}
    with RawServer(lambda n, p: http_answer(honest(p) | usage)) as server:
        lm = asked(server)
        lm.score(PREFIXES, CONTINUATIONS)
        assert 12 <= lm.metrics()["tokens_sent"] <= 200


def test_half_a_surrogate_pair_is_no_answer(asked: Opened) -> None:
    spoilt = altered(lambda body: body["choices"][0].update(text="\ud800"))
    with RawServer(spoilt) as server, pytest.raises(ServerError, match="no text"):
        texts_of(asked(server), ["red red"], 2)


@pytest.mark.parametrize("then", ["constant", "other_model", "one_input", "moved"])
def test_a_server_that_goes_wrong_after_the_probe_gives_no_scores(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores of a whole call are given out only while the server is the one that was probed."""
    monkeypatch.setattr("replug.models.http.http_lm.REQUESTS_BETWEEN_LOOKS", 1)
    with FaultServer() as server:
        lm = connect(server_spec(server.url, patience_minutes=1e-6), RequestBudget(None))
        assert bits(lm.score(PREFIXES, CONTINUATIONS)) == RIGHT
        server.mode = then
        with pytest.raises(RunError):
            lm.score(PREFIXES, CONTINUATIONS)
        lm.close()


def test_a_server_that_comes_back_with_another_model_is_noticed_at_once() -> None:
    with FaultServer() as server:
        lm = connect(server_spec(server.url), RequestBudget(None))
        server.mode, server.kinds, server.first_faults = "other_model", ["drop"], server.requests + 1
        with pytest.raises(ServerError, match="is not the model that was probed"):
            lm.score(PREFIXES, CONTINUATIONS)
        lm.close()
