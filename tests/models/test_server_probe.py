"""The probe: what it refuses by arrays, and by servers that are wrong in known ways."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.models.http import server_source as server_probe
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.models.http.server_source import connect
from replug.models.local.stand_in_lm import StandInLM
from tests.support.fault_server import MODEL, FaultServer, server_spec, word_tokenizer, write_word_tokenizer

pytestmark = pytest.mark.usefixtures("two_attempts")


def refusal(server: FaultServer, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        connect(server_spec(server.url, **{"patience_minutes": 0.001} | changes), RequestBudget(None))
    message = str(caught.value)
    assert server.url in message
    assert "\n" not in message
    assert "http-lm" not in [thread.name for thread in threading.enumerate()]
    return message


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_an_honest_server_passes_and_gets_a_fingerprint(api: str) -> None:
    with FaultServer() as server:
        lm = connect(server_spec(server.url, api=api), RequestBudget(None))
        lm.close()
        again = connect(server_spec(server.url), RequestBudget(None))
        again.close()
    assert lm.fingerprint.dtype == np.float32
    assert lm.fingerprint.ndim == 1
    assert lm.fingerprint.tobytes() == again.fingerprint.tobytes()
    assert lm.identity == again.identity
    assert lm.identity.startswith(f"{MODEL}#")


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("shifted", "gives a prompt's tokens the wrong log-probs: 12 tokens that it generated with .* when sent back"),
        ("no_logprobs", "gives no log-probs of the prompt .* set lm.score=yes or answer"),
        ("no_echo", "gives no log-probs of the prompt .* set lm.score=yes or answer"),
        ("length_dependent", "gives the same tokens other log-probs in a longer text"),
        ("constant", "log-probs that do not follow the text: a document that holds the very text"),
        ("down", "did not answer in \\d+ attempts .*; last: 503 Service Unavailable: it is down"),
    ],
)
def test_a_server_that_is_wrong_for_good_is_refused_with_the_reason(mode: str, reason: str) -> None:
    with FaultServer(mode=mode) as server:
        message = refusal(server)
    assert re.search(reason, message), message


@pytest.mark.parametrize("form", [" {}/ ", "{}/completions", "{}/chat/completions/"])
def test_an_address_is_taken_as_people_copy_it(form: str) -> None:
    with FaultServer() as server:
        lm = connect(server_spec(form.format(server.url)), RequestBudget(None))
        lm.close()
    assert lm.url == server.url


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("http://{}", r"404 Not Found.*; expected lm.url to be such as http://HOST:PORT/v1, and lm.model a name"),
        ("localhost:8000", r"lm.url is localhost:8000; expected http://HOST:PORT/v1$"),
        ("http://{}/v1?api-key=2024-10-21", r"lm.url holds a secret or a query; expected lm.url=http://{}/v1\. "),
        ("http://me:hunter2@{}/v1", r"lm.url holds a secret or a query; expected http://HOST:PORT/v1\. "),
        ("grpc://{}/v1", r"lm.url is grpc://{}/v1; expected http://HOST:PORT/v1$"),
        ("http://[::1/v1", r"expected http://HOST:PORT/v1$"),
    ],
)
def test_another_address_is_refused_with_the_right_one_and_no_password(form: str, says: str) -> None:
    with FaultServer() as server, pytest.raises(UserError) as caught:
        host = f"127.0.0.1:{server.port}"
        connect(server_spec(form.replace("{}", host)), RequestBudget(None))
    assert re.search(says.replace("{}", host), str(caught.value)), str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("mode", ["one_input", "crowded"])
def test_a_server_that_is_wrong_about_several_inputs_gets_one_a_request(mode: str) -> None:
    prefixes, continuations = ["the red boat", "a boat", "the boat"], [" red", " boat", " the"]
    with FaultServer(mode=mode) as server:
        lm = connect(server_spec(server.url, patience_minutes=0.001), RequestBudget(None))
        scores = lm.score(prefixes, continuations)
        lm.close()
    expected = StandInLM().score(prefixes, continuations)
    assert [s.token_logprobs.tolist() for s in scores] == [e.token_logprobs.tolist() for e in expected]
    assert all(len(payload["prompt"]) == 1 for payload in server.payloads[-3:])


def test_a_shifted_server_and_another_models_tokenizer_are_refused(tmp_path: Path) -> None:
    other = write_word_tokenizer(tmp_path, [server_probe.HELPFUL[::-1]])
    for mode, own in (("shifted", word_tokenizer()), ("", other)):
        with FaultServer(mode=mode) as server:
            assert "wrong log-probs" in refusal(server, tokenizer=own)
            assert "wrong log-probs" in refusal(server, tokenizer=own, api="prompt_logprobs")


def test_a_budget_that_does_not_hold_the_probe_is_named() -> None:
    with FaultServer() as server, pytest.raises(BudgetSpent, match=r"lm\.max_requests=3"):
        connect(server_spec(server.url), RequestBudget(None, max_requests=3))


RIGHT, PLAIN = -np.arange(1, 21, dtype=np.float32), np.full(20, -30.0)
LONG = np.concatenate([RIGHT + 0.1, [-1.0]])  # as rounding may move it


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "None"),
        ({"long": LONG[:20]}, "in a longer text"),  # which is not longer
        ({"long": LONG + 0.1}, "in a longer text"),
        ({"long": LONG - 1.5 * np.eye(21)[7]}, "in a longer text"),  # one token is far away
        ({"echoed": [RIGHT - 8.5, RIGHT]}, "nats each have -14.75 when sent back"),
        ({"echoed": [RIGHT[1:] - 8.5, RIGHT]}, "None"),  # what comes back in other tokens does not count
        ({"echoed": [RIGHT[1:], RIGHT[1:]]}, "generates nothing that can be sent back"),
        ({"others": [PLAIN, RIGHT - 0.4]}, "only 0.40 nats"),
    ],
)
def test_a_shortcoming_is_found_in_arrays(changes: dict, says: str) -> None:
    answers = {"generated": [RIGHT, RIGHT], "echoed": [RIGHT, RIGHT]}
    honest = {"short": RIGHT, "long": LONG, "others": [PLAIN, PLAIN - 1], **answers}
    assert says in str(server_probe.find_shortcoming(**honest | changes))
