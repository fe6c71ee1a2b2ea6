"""Requests by the thousand to a server of which three answers in ten go wrong: nothing lost, doubled or out of order.

REPLUG_STORM=full sends 10,000 requests; the default tenth is for every day.
"""

import os
import time
from collections import Counter

import numpy as np
import pytest

from replug.models.http import connection as server_connection
from replug.models.http.http_lm import INPUTS_PER_REQUEST, HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.local.stand_in_lm import StandInLM
from tests.support.fault_server import TRANSIENT, FaultServer, server_spec

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # a request that is late would be sent again, and counted

NUM_REQUESTS = 10_000 if os.environ.get("REPLUG_STORM") == "full" else 1_000
WORDS = ["red", "blue", "green", "the", "boat", "of", "日本語", "🙂"]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 40)


def storm(url: str, budget: RequestBudget) -> HttpLM:
    return HttpLM(server_spec(url, timeout_seconds=2.0, max_concurrency=64), budget)


def pairs(number: int) -> tuple[list[str], list[str]]:
    """No two are the same."""
    rng = np.random.default_rng(0)
    prefixes = [f"{row} " + " ".join(rng.choice(WORDS, 3 + row % 5)) for row in range(number)]
    return prefixes, ["".join(f" {word}" for word in rng.choice(WORDS, 1 + row % 4)) for row in range(number)]


def test_every_answer_arrives_once_in_order_and_right() -> None:
    prefixes, continuations = pairs(NUM_REQUESTS * INPUTS_PER_REQUEST)
    expected = StandInLM().score(prefixes, continuations)
    budget = RequestBudget(None)
    with FaultServer(fault_share=0.3) as server:
        lm = storm(server.url, budget)
        begun = time.monotonic()
        calls = range(0, len(prefixes), 20)
        futures = [lm.submit(prefixes[i : i + 20], continuations[i : i + 20]) for i in calls]
        scores = [score for future in futures for score in future.result(500)]
        seconds, metrics = time.monotonic() - begun, lm.metrics()
        lm.close()
    assert [s.token_logprobs.tobytes() for s in scores] == [e.token_logprobs.tobytes() for e in expected]
    assert server.answered == Counter(p + c for p, c in zip(prefixes, continuations, strict=True))
    assert set(server.faults) == {"none", *TRANSIENT}
    bad = server.requests - NUM_REQUESTS
    assert 0.2 < bad / server.requests < 0.4
    assert metrics["retries"] == bad
    assert budget.requests == server.requests
    assert budget.tokens >= server.tokens
    assert server.most_open <= 64
    print(f"{server.requests} requests for {NUM_REQUESTS} answers in {seconds:.1f} s: {dict(server.faults)}")
