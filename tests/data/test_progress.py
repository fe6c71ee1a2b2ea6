"""Lines of progress: few in a log, one that is rewritten on a terminal, and in a run of the whole."""

from collections.abc import Iterator

import pytest

from replug.data import progress
from replug.data.progress import Progress, Stages


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """The contents of a terminal's last line, one after the other."""
    lines: list[str] = []
    progress.rewrite_with(lines.append)
    yield lines
    progress.rewrite_with(None)


def work(clock: Clock, doing: Progress, *steps: tuple[float, int]) -> None:
    for seconds, units in steps:
        clock.now += seconds
        doing.advance(units)


def test_a_log_has_few_lines_and_always_the_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, Progress("cutting", total=10), (16, 2), (2, 1), (22, 7))
    assert capsys.readouterr().err == "cutting: 2/10 · 1:04 left\ncutting: 10/10 · took 0:40\n"


def test_work_of_less_than_a_second_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, Progress("cutting", total=10), (0.4, 5), (0.5, 5))
    assert capsys.readouterr().err == ""


def test_a_night_has_a_line_in_ten_minutes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, Progress("training", total=1000), *[(60, 1)] * 600)
    assert 50 < len(capsys.readouterr().err.splitlines()) < 80


def test_a_line_of_a_stage_speaks_of_the_whole(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages()
    stages.plan([("index", 20.0), ("training", 60.0), ("held-out texts", 100.0)])
    with stages.stage("index"):
        pass
    with stages.stage("training"):
        steps, beside = Progress("step", 30), Progress("embedding index v1", 10)
        work(clock, beside, (20, 5))  # in the background of the steps
        work(clock, steps, (10, 10))
    assert capsys.readouterr().err.splitlines() == [
        "stage 1 of 3, index, about 0:20",
        "stage 2 of 3, training, about 1:00",
        "stage 2 of 3, training: step 10/30 · all of it: 2:40 left",  # 20 steps of 3 s, and 100 s
    ]


def test_before_its_pace_is_known_a_stage_takes_what_was_expected(clock: Clock, shown: list[str]) -> None:
    stages = Stages()
    stages.plan([("labels", 50.0), ("training", 60.0)])
    with stages.stage("labels"):
        work(clock, Progress("training texts", 100), (1, 50), (3, 10))
    # 49 s of 50 are left, and a minute; then 40 texts of 4 s / 60.
    assert shown[1:] == [  # the first erases what stood there before the line that the stage begins with
        "stage 1 of 2, labels: training texts 50/100 · all of it: 1:49 left",
        "stage 1 of 2, labels: training texts 60/100 · all of it: 1:03 left",
        "",
    ]


def test_unknown_times_of_stages_are_not_made_up(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages()
    with stages.stage("labels"):  # of no run
        pass
    stages.plan([("labels", None), ("training", None), ("tuned", 5.0)])
    for name in ("labels", "training", "index", "tuned"):
        with stages.stage(name):
            work(clock, Progress("part", 10), (20, 5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stage 1 of 3, labels"
    assert lines[1] == "stage 1 of 3, labels: part 5/10 · 0:20 left of this stage"
    assert lines[-1] == "stage 3 of 3, tuned: part 5/10 · all of it: 0:20 left"
    assert "part: 5/10 · 0:20 left" in lines, "an index that no stage is planned for"
