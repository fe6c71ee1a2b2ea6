"""Decide when the corpus is re-embedded and when the new index takes over. Pure.

A refresh starts at every multiple of `every_steps`. If another refresh is under way, it is skipped, never queued.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from replug.config.schema import RefreshConfig

WHEN_READY = "when_ready"  # of refresh.lag_steps
INTERVALS_TO_STOP = 3  # between refreshes: training stops when the index is older


class Start(Enum):
    """Decision on a refresh at a step boundary."""

    nothing = "nothing"  # none is to start here
    begin = "begin"
    skip = "skip"  # one is to start, but another is under way


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """A refresh is adopted exactly `lag_steps` after its start: two runs see the same index at the same step.

    With `lag_steps` 0 training waits for the new index. None adopts it at the first boundary at which it is ready, and
    no later than the age limit; such a run is not reproducible.
    """

    every_steps: int
    lag_steps: int | None
    max_age_steps: int
    max_steps: int

    def is_due(self, step: int, live_step: int, pending_step: int, is_ready: bool) -> bool:
        """Return whether a refresh is adopted at this boundary. Training waits for a due refresh that is not ready."""
        if self.lag_steps is None:
            return is_ready or step - live_step >= self.max_age_steps
        return step >= pending_step + self.lag_steps

    @property
    def adopts_at_start(self) -> bool:
        """Return whether training waits for each refresh at the boundary where it starts."""
        return self.lag_steps == 0

    def starts_at(self, step: int) -> bool:
        """At every multiple of `every_steps`, unless training ends before the new index would be adopted."""
        return step > 0 and step % self.every_steps == 0 and step + (self.lag_steps or 0) < self.max_steps

    def start(self, step: int, live_step: int, pending_step: int | None) -> Start:
        """`live_step` and `pending_step` are those of the weights in the live index and in the one under way."""
        if not self.starts_at(step) or step in (live_step, pending_step):
            return Start.nothing  # equal: the run stopped after this boundary and was resumed at it
        return Start.begin if pending_step is None else Start.skip

    def is_too_old(self, step: int, live_step: int) -> bool:
        """Return whether the index is so old that training stops."""
        return step - live_step > self.max_age_steps

    @property
    def num_starts(self) -> int:
        """Refreshes of a whole run, where none is skipped."""
        return sum(self.starts_at(step) for step in range(0, self.max_steps, self.every_steps))


def refresh_policy(keys: RefreshConfig, max_steps: int, trains_documents: bool = True) -> RefreshPolicy:
    """Return the policy of a training of `max_steps` steps. Frozen documents are never refreshed."""
    if not trains_documents:
        return RefreshPolicy(max_steps + 1, 0, max_steps + 1, max_steps)
    return RefreshPolicy(keys.every_steps, _lag(keys), INTERVALS_TO_STOP * keys.every_steps, max_steps)


def refresh_problems(keys: RefreshConfig) -> Iterator[str]:
    """Yield what no policy can be made of, with the key and what was expected."""
    if isinstance(keys.lag_steps, str) and keys.lag_steps != WHEN_READY:
        yield f"refresh.lag_steps is {keys.lag_steps}; expected a number of steps, or {WHEN_READY}"
        return
    lag = _lag(keys) or 0
    if lag < 0 or lag > keys.every_steps:
        yield (
            f"refresh.lag_steps is {lag}; expected 0 to refresh.every_steps ({keys.every_steps}), so that one "
            "refresh is adopted before the next starts"
        )


def _lag(keys: RefreshConfig) -> int | None:
    """Return half of the distance between two refreshes by default; None to adopt an index when it is ready."""
    if keys.lag_steps is None:
        return max(1, keys.every_steps // 2)
    return keys.lag_steps if isinstance(keys.lag_steps, int) else None
