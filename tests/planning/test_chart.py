import pytest

from replug.planning.chart import busy_shares
from replug.planning.simulate import Span


def test_busy_shares_count_the_devices_at_work_in_each_part_of_the_run() -> None:
    spans = [Span(0.0, 1.0, 2), Span(1.0, 3.0, 1), Span(3.5, 4.0, 2)]
    assert list(busy_shares(spans, devices=2, wall=4.0, bins=4)) == pytest.approx([1.0, 0.5, 0.5, 0.5])


def test_a_role_without_work_is_idle() -> None:
    assert not busy_shares([], devices=1, wall=4.0).any()
