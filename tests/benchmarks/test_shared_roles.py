"""The benchmark of shared roles: what it compares is what was asked for, and its fake GPUs do one thing at a time."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.paced_devices import PacedDevice, Piece, take_pieces
from benchmarks.shared_roles import (
    ASKED_RATIO,
    NOMINAL,
    STEPS,
    Measured,
    best_of,
    compare,
    idle_share,
    job_of_benchmark,
    simulated,
    training_seconds,
)


def test_pieces_on_one_device_take_turns_and_are_noted_without_the_turns_of_others(tmp_path: Path) -> None:
    def work(number: int) -> str:
        device = PacedDevice("a:0", tmp_path)
        return device.work("score", lambda: str(number), lambda _: 0.1)

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == ["0", "1", "2"]
    assert time.monotonic() - began >= 0.3
    assert [piece.held >= piece.asked == 0.1 for piece in take_pieces(tmp_path)] == [True] * 3


def test_a_piece_whose_computing_takes_longer_than_it_may_is_late(tmp_path: Path) -> None:
    PacedDevice("a:0", tmp_path).work("embed", lambda: time.sleep(0.02), lambda _: 0.01)
    [piece] = take_pieces(tmp_path)
    assert piece.held == piece.computed > piece.asked


def test_the_best_split_idles_about_30_percent_and_the_plan_asks_of_shared_roles_what_is_asked() -> None:
    job = job_of_benchmark(STEPS)
    split, shared = best_of(job, is_shared=False), best_of(job, is_shared=True)
    assert (split.score, split.embed, split.train, split.shared) == (2, 1, 1, ())
    assert idle_share(job, split, NOMINAL) == pytest.approx(0.30, abs=0.02)
    planned = [training_seconds(simulated(job, one, NOMINAL)) for one in (split, shared)]
    assert planned[0] / planned[1] > ASKED_RATIO
    assert job.shape.step.batch_size * STEPS <= job.shape.num_queries, "a text that comes twice is not scored again"


def ran(loss: float, seconds: float, computed: float) -> Measured:
    """Forty steps, and pieces as long as they are said to be."""
    row = {"time/step_seconds": seconds / STEPS, "time/search_seconds": 0.01}
    row |= {"time/train_seconds": NOMINAL.train, "time/retrieve_seconds": NOMINAL.encode}
    pieces = [Piece("score", 0.0, NOMINAL.unit, NOMINAL.unit), Piece("embed", computed, 0.4, 0.4)]
    return Measured([loss] * STEPS, [row] * STEPS, pieces, 0.3)


def test_what_is_printed_says_ratio_errors_losses_and_whether_the_machine_was_too_busy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of_benchmark(STEPS)
    splits = {"split": best_of(job, is_shared=False), "shared": best_of(job, is_shared=True)}
    planned = training_seconds(simulated(job, splits["split"], NOMINAL))
    compare(job, splits, {"split": ran(0.5, planned, 0.1), "shared": ran(0.5, planned / 2, 0.1)})
    said = capsys.readouterr().out
    assert "(+0.0%, asked 15%)" in said and "faster by 2.00x (asked: 1.2x)" in said and "equal to the last bit" in said
    compare(job, splits, {"split": ran(0.5, planned, 0.1), "shared": ran(0.6, planned, 0.5)})
    said = capsys.readouterr().out
    assert "NOT EQUAL" in said and "this machine was too busy" in said
