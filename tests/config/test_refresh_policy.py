"""When refreshes start, worked out by hand."""

import pytest

from replug.config.refresh_policy import RefreshPolicy


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (RefreshPolicy(10, 3, 30, 40), [10, 20, 30]),
        (RefreshPolicy(10, 10, 30, 40), [10, 20]),  # one begun at 30 would be adopted at 40, after the last step
        (RefreshPolicy(10, 0, 30, 31), [10, 20, 30]),
        (RefreshPolicy(50, 1, 150, 40), []),
    ],
)
def test_a_refresh_starts_at_every_multiple_that_leaves_time_to_adopt_it(
    policy: RefreshPolicy, steps: list[int]
) -> None:
    assert [step for step in range(policy.max_steps) if policy.starts_at(step)] == steps
    assert policy.num_starts == len(steps)
