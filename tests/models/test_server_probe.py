"""The probe: what it refuses by arrays, and by servers that are wrong in known ways."""

import re
import threading

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.models.http import connection as server_connection
from replug.models.http import server_source as server_probe
from replug.models.http.connection import ServerSpec
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.models.http.server_source import connect
from tests.support.fault_server import MODEL, FaultServer, server_spec, write_word_tokenizer

WAYS = [("echo", False), ("echo", True), ("prompt_logprobs", True)]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "BACKOFF_SECONDS", 0.01)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    probe = server_probe
    texts = [probe.HELPFUL, probe.LONGER, *probe.OTHERS, *probe.BEGINNINGS]
    return write_word_tokenizer(tmp_path_factory.mktemp("tokenizer"), texts)


def refusal(server: FaultServer, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        connect(server_spec(server.url, **{"max_attempts": 2} | changes), RequestBudget(None))
    message = str(caught.value)
    assert server.url in message
    assert "\n" not in message
    assert "http-lm" not in [thread.name for thread in threading.enumerate()]
    return message


@pytest.mark.parametrize(("api", "with_ids"), WAYS)
def test_an_honest_server_passes_and_gets_a_fingerprint(tokenizer: str, api: str, with_ids: bool) -> None:
    folder = tokenizer if with_ids else None
    with FaultServer(tokenizer=folder) as server:
        lm = connect(ServerSpec(server.url, MODEL, api, folder), RequestBudget(None))
        lm.close()
        again = connect(ServerSpec(server.url, MODEL), RequestBudget(None))
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
        ("no_logprobs", "gives no log-probs of the prompt .* llama.cpp's own server and chat APIs have neither"),
        ("no_echo", "gives no log-probs of the prompt .* llama.cpp's own server and chat APIs have neither"),
        ("length_dependent", "gives the same tokens other log-probs in a longer text"),
        ("constant", "log-probs that do not follow the text: all 41 tokens have the same"),
        ("one_input", "inputs alone, but not several of them .* set lm.prompts_per_request=1"),
        ("mixed_up", "inputs alone, but not several of them"),
        ("crowded", "inputs that share a request other log-probs than alone"),
        ("down", "did not answer rows 0 to 0 .* in 2 attempts; last: 503 Service Unavailable: it is down"),
    ],
)
def test_a_server_that_is_wrong_for_good_is_refused_with_the_reason(mode: str, reason: str) -> None:
    with FaultServer(mode=mode) as server:
        message = refusal(server)
    assert re.search(reason, message), message


def test_a_server_that_takes_one_input_a_request_passes_with_one_input_a_request() -> None:
    with FaultServer(mode="one_input") as server:
        connect(server_spec(server.url, prompts_per_request=1), RequestBudget(None)).close()


def test_a_shifted_server_is_refused_with_ids_too(tokenizer: str) -> None:
    with FaultServer(mode="shifted", tokenizer=tokenizer) as server:
        assert "wrong log-probs" in refusal(server, tokenizer=tokenizer)
        assert "wrong log-probs" in refusal(server, tokenizer=tokenizer, api="prompt_logprobs")


def test_a_budget_that_does_not_hold_the_probe_is_named() -> None:
    with FaultServer() as server, pytest.raises(BudgetSpent, match=r"lm\.max_requests=3"):
        connect(ServerSpec(server.url, MODEL), RequestBudget(None, max_requests=3))


def test_scores_in_a_longer_text_may_differ_by_roundings_and_not_by_more() -> None:
    short = -np.arange(1, 21, dtype=np.float32)
    rounded = np.concatenate([short + 0.1, [-1.0]])
    assert server_probe.length_shortcoming(short, rounded) is None
    assert server_probe.length_shortcoming(short, rounded[:20]) is not None  # not longer
    assert server_probe.length_shortcoming(short, np.concatenate([short + 0.2, [-1.0]])) is not None
    one_wrong = rounded.copy()
    one_wrong[7] -= 1.5
    assert server_probe.length_shortcoming(short, one_wrong) is not None


def test_generated_texts_that_come_back_in_other_tokens_do_not_count() -> None:
    right, wrong = np.full(4, -0.5), np.full(4, -9.0)
    assert server_probe.generation_shortcoming([right, right], [right + 0.05, np.full(3, -9.0)]) is None
    assert "-0.50 nats each have -9.00 when sent back" in str(server_probe.generation_shortcoming([right], [wrong]))
    nothing = "generates nothing that can be sent back"
    assert nothing in str(server_probe.generation_shortcoming([], []))
    assert nothing in str(server_probe.generation_shortcoming([np.zeros(0)], [np.zeros(0)]))
    assert nothing in str(server_probe.generation_shortcoming([right], [np.full(3, -0.5)]))


def test_a_document_must_help_the_text_it_holds() -> None:
    helped, plain = np.full(5, -1.0), np.full(5, -4.0)
    assert server_probe.help_shortcoming(helped, [plain, plain - 1]) is None
    assert "only 0.40 nats" in str(server_probe.help_shortcoming(helped, [plain, helped - 0.4]))
    assert server_probe.help_shortcoming(plain, [helped]) is not None
