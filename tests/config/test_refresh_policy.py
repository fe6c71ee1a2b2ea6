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


def test_a_refresh_is_skipped_while_another_is_under_way() -> None:
    assert AT_LAG.start(20, live_step=0, pending_step=10) is Start.skip
    assert AT_LAG.start(20, live_step=10, pending_step=None) is Start.begin
    assert AT_LAG.start(21, live_step=10, pending_step=None) is Start.nothing


@pytest.mark.parametrize(("live_step", "pending_step"), [(10, None), (0, 10)])
def test_a_run_resumed_at_a_boundary_does_not_start_its_refresh_again(live_step: int, pending_step: int | None) -> None:
    assert AT_LAG.start(10, live_step, pending_step) is Start.nothing


@pytest.mark.parametrize("is_ready", [True, False])
def test_at_lag_a_refresh_is_due_at_its_lag_ready_or_not(is_ready: bool) -> None:
    assert [step for step in range(10, 20) if AT_LAG.is_due(step, 0, 10, is_ready)] == list(range(13, 20))


def test_when_ready_a_refresh_is_due_once_it_is_ready_or_the_live_index_at_its_age_limit() -> None:
    assert WHEN_READY.is_due(11, 0, 10, is_ready=True)
    assert [step for step in range(10, 40) if WHEN_READY.is_due(step, 0, 10, False)] == list(range(30, 40))
