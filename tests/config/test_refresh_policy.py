"""When refreshes start, are due, are skipped and are too old, worked out by hand."""

import pytest

from replug.config.refresh_policy import RefreshPolicy, Start

AT_LAG = RefreshPolicy(every_steps=10, lag_steps=3, max_age_steps=30, max_steps=40)
WHEN_READY = RefreshPolicy(every_steps=10, lag_steps=None, max_age_steps=30, max_steps=40)


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (AT_LAG, [10, 20, 30]),
        (RefreshPolicy(10, 10, 30, 40), [10, 20]),  # one begun at 30 would be adopted at 40, after the last step
        (RefreshPolicy(10, 0, 30, 31), [10, 20, 30]),
        (WHEN_READY, [10, 20, 30]),
        (RefreshPolicy(50, 1, 150, 40), []),
    ],
)
def test_a_refresh_starts_at_every_multiple_that_leaves_time_to_adopt_it(
    policy: RefreshPolicy, steps: list[int]
) -> None:
    assert [step for step in range(policy.max_steps) if policy.starts_at(step)] == steps
    assert policy.num_starts == len(steps)


@pytest.mark.parametrize(
    ("step", "live_step", "pending_step", "expected"),
    [
        (20, 0, 10, Start.skip),  # another is under way
        (20, 10, None, Start.begin),
        (21, 10, None, Start.nothing),
        (10, 10, None, Start.nothing),  # a run resumed at a boundary does not start its refresh again
        (10, 0, 10, Start.nothing),
    ],
)
def test_a_refresh_starts_once_and_alone(step: int, live_step: int, pending_step: int | None, expected: Start) -> None:
    assert AT_LAG.start(step, live_step, pending_step) is expected


def test_a_refresh_is_due_at_its_lag_or_once_it_is_ready_or_at_the_age_limit_of_the_live_index() -> None:
    for is_ready in (True, False):
        assert [step for step in range(10, 20) if AT_LAG.is_due(step, 0, 10, is_ready)] == list(range(13, 20))
    assert WHEN_READY.is_due(11, 0, 10, is_ready=True)
    assert [step for step in range(10, 40) if WHEN_READY.is_due(step, 0, 10, False)] == list(range(30, 40))
