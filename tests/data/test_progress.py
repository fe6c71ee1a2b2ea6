"""Progress lines tell what is done and how long the rest will take."""

import pytest

import replug.data.progress
from replug.data.progress import Progress


class Clock:
    """Stands still unless moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(replug.data.progress.time, "monotonic", clock)
    return clock


def test_the_time_left_follows_from_the_pace_so_far(clock, capsys):
    progress = Progress("cutting", total=10)
    clock.now += 6
    progress.advance(2, note="books")  # 3 s each, 8 left
    clock.now += 6
    progress.advance(8)
    assert capsys.readouterr().err == "cutting: 2/10 · 0:24 left · books\ncutting: 10/10 · took 0:12\n"


def test_lines_keep_their_distance_and_the_end_is_always_told(clock, capsys):
    progress = Progress("cutting", total=5)
    for _ in range(5):
        clock.now += 2
        progress.advance()
    assert [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()] == ["1/5", "4/5", "5/5"]
