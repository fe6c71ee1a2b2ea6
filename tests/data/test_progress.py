"""Lines of progress: few in a log, one that is rewritten on a terminal, and in a run of the whole."""

from types import SimpleNamespace

import pytest

from replug.data import progress
from replug.data.progress import Progress, Stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds, `now`, that pass when a test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def work(clock: SimpleNamespace, doing: Progress, *steps: tuple[float, int]) -> None:
    for seconds, units in steps:
        clock.now += seconds
        doing.advance(units)


def test_a_log_has_few_lines(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, Progress("cutting", total=10), (16, 2), (2, 1), (18, 2), (4, 5))
    lines = ["cutting: 2/10", "cutting: 5/10 · 0:33 left"]  # 20 s of three units
    assert capsys.readouterr().err.splitlines() == lines


def test_a_line_of_a_stage_speaks_of_the_whole(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages()
    stages.plan([("index", {"documents": 50}), ("training", {"pairs": 120}), ("held-out texts", {"pairs": 100})])
    with stages.stage("index"):
        work(clock, Progress("embedding index v0", 50, work=("documents", 1)), (3, 50))
    with stages.stage("training"):
        steps, beside = Progress("step", 30, work=("pairs", 4)), Progress("embedding index v1", 10)
        work(clock, beside, (10, 5))  # in the background of the steps
        work(clock, steps, (10, 1), (20, 5), (40, 5))
    assert capsys.readouterr().err.splitlines() == [
        "stage 1 of 3, index",
        "stage 2 of 3, training",
        "stage 2 of 3, training: step 1/30",
        # 24 steps of 4 s and 100 pairs of a second, then 19 steps of 6 s and 100 pairs of 1.5 s.
        "stage 2 of 3, training: step 6/30 · all of it: 3:16 left",
        "stage 2 of 3, training: step 11/30 · all of it: 4:24 left",
    ]


def test_a_run_speaks_of_the_whole_only_where_all_that_is_left_was_timed(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = Stages()
    with stages.stage("labels"):  # of no run
        pass
    stages.plan([("labels", {"pairs": 9}), ("training", {"steps": 7}), ("tuned", {"documents": 50, "pairs": 0})])
    with stages.stage("labels"):
        work(clock, Progress("part", 9, work=("pairs", 1)), (20, 1), (20, 4))
    with stages.stage("index"):
        work(clock, Progress("embedding", 50, work=("documents", 1)), (20, 10), (20, 20))
    with stages.stage("training"):
        work(clock, Progress("part", 10), (1, 1), (20, 5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[2] == "stage 1 of 3, labels: part 5/9 · 0:20 left of this stage"
    assert "embedding: 30/50 · 0:20 left" in lines, "an index that no stage is planned for"
    assert lines[-1] == "stage 2 of 3, training: part 6/10 · 0:16 left of this stage"
