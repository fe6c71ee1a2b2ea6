"""Training against a server that throttles, fails, goes away and costs money: the same losses, or a clean stop.

The server scores as the stand-in does, so a run on the stand-in itself says what every loss must be.
"""

import json
from pathlib import Path

import pytest

from tests.support.command_line import start
from tests.support.fault_server import FaultServer
from tests.support.runs import heldout_bits

pytestmark = pytest.mark.slow
SERVER = ["lm.path=null", "lm.model=words", "data.source=null", "lm.prompts_per_request=8", "lm.max_concurrency=8"]


def served(server: FaultServer, quiet_run: Path, *more: str) -> list[str]:
    return [*SERVER, f"lm.url={server.url}", f"data.prepared={quiet_run / 'data'}", *more]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_through_a_faulty_server_has_the_losses_of_the_lm_itself(quiet_run, finish, tmp_path):
    with FaultServer(fault_share=0.2) as server:
        finish(tmp_path / "run", *served(server, quiet_run, "lm.timeout_seconds=2", "lm.max_attempts=10"))
        assert sum(server.faults.values()) > 10
    assert losses(tmp_path / "run") == losses(quiet_run)
    assert heldout_bits(tmp_path / "run") == heldout_bits(quiet_run)


@pytest.mark.nightly
def test_a_budget_stops_the_run_before_it_is_passed_and_only_a_larger_one_goes_on(quiet_run, finish, tmp_path):
    run = tmp_path / "run"
    with FaultServer() as server:
        process = start(run, *served(server, quiet_run, "lm.max_tokens_sent=20000"))
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        assert "lm.max_tokens_sent" in output.splitlines()[-1]
        spent = json.loads((run / "lm_spent.json").read_text())
        assert spent["requests"] == server.requests
        finish(run, *served(server, quiet_run, "lm.max_tokens_sent=100000000"))
    assert losses(run) == losses(quiet_run)
