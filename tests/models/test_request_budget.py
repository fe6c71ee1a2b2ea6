"""The budget file: never passed, never forgotten, whatever ends the process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replug.config.errors import RunError
from replug.models.http.request_budget import BudgetSpent, RequestBudget


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "budget.json"


def spent(path: Path) -> dict[str, int]:
    return json.loads(path.read_text())


def test_a_request_counts_at_most_what_was_reserved_and_then_what_it_cost(path: Path) -> None:
    budget = RequestBudget(path)
    assert budget.reserve(100)
    assert (budget.requests, budget.tokens) == (1, 0)
    assert spent(path) == {"requests": 1, "tokens": 100}
    budget.settle(100, 60)
    assert (budget.requests, budget.tokens) == (1, 60)
    assert spent(path) == {"requests": 1, "tokens": 60}


def test_it_goes_on_where_it_was_when_it_is_opened_again(path: Path) -> None:
    first = RequestBudget(path, max_requests=3, max_tokens=100)
    for _ in range(2):
        assert first.reserve(20)
        first.settle(20, 15)
    again = RequestBudget(path, max_requests=3, max_tokens=100)
    assert (again.requests, again.tokens) == (2, 30)
    assert again.reserve(70)
    with pytest.raises(BudgetSpent, match=r"lm\.max_requests=3"):
        again.reserve(1)
    raised = RequestBudget(path, max_requests=4, max_tokens=100)
    assert raised.requests == 3


def test_a_reservation_that_may_fit_later_waits_and_one_that_cannot_says_what_is_spent() -> None:
    budget = RequestBudget(None, max_tokens=100)
    assert budget.reserve(60)
    assert not budget.reserve(60)  # the first may turn out to cost less
    budget.settle(60, 40)
    assert budget.reserve(60)
    assert not budget.reserve(1)
    budget.settle(60, 60)
    with pytest.raises(RunError, match=r"lm\.max_tokens_sent=100 .* 100 tokens are spent and it may take 1; raise it"):
        budget.reserve(1)


def test_a_broken_budget_file_does_not_begin_at_0(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("nonsense")
    with pytest.raises(ValueError, match="Expecting value"):
        RequestBudget(path)


def test_processes_at_once_never_pass_the_limit_and_lose_no_count(path: Path) -> None:
    spender = SPENDER.replace("Path(sys.argv[1])", "Path(sys.argv[1]), max_requests=300")
    processes = [
        subprocess.Popen([sys.executable, "-c", spender, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=200)[0].count(b"sent\n") for process in processes]
    assert sum(said) == 300
    assert spent(path) == {"requests": 300, "tokens": 2400}


SPENDER = """
import sys
from pathlib import Path
from replug.models.http.request_budget import RequestBudget

budget = RequestBudget(Path(sys.argv[1]))
while True:
    budget.reserve(10)
    print("sent", flush=True)
    budget.settle(10, 8)
"""


def test_kill_9_at_any_moment_leaves_a_whole_line_that_counts_all_that_was_sent(path: Path) -> None:
    total = 0
    for pause in (0.0, 0.003, 0.01, 0.03):
        process = subprocess.Popen([sys.executable, "-c", SPENDER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        total += 1 + process.stdout.read().count(b"sent\n")
        process.wait()
        budget_file = spent(path)
        assert len(path.read_bytes()) == 64
        assert budget_file["requests"] >= total
        assert budget_file["tokens"] >= 8 * total
        assert budget_file["requests"] - total <= 4  # at most the one that was reserved and not yet sent, for each kill
