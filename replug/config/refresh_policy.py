"""Decide when the corpus is re-embedded and when the new index takes over. Pure."""

from dataclasses import dataclass

from replug.config.schema import RefreshConfig

INTERVALS_TO_STOP = 3  # refresh intervals: training stops when the index is older


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """A refresh starts at every multiple of `every_steps`, and is adopted exactly `lag_steps` after its start.

    So two runs see the same index at the same step. With `lag_steps` 0 training waits for the new index.
    """

    every_steps: int
    lag_steps: int
    max_age_steps: int
    max_steps: int

    def starts_at(self, step: int) -> bool:
        """Return whether a refresh starts at a step; none starts if training ends before its adoption."""
        return step > 0 and step % self.every_steps == 0 and step + self.lag_steps < self.max_steps

    def is_too_old(self, step: int, live_step: int) -> bool:
        """Return whether the index is so old that training stops."""
        return step - live_step > self.max_age_steps

    @property
    def num_starts(self) -> int:
        """Return the number of refreshes in a whole run."""
        return sum(self.starts_at(step) for step in range(0, self.max_steps, self.every_steps))


def refresh_policy(keys: RefreshConfig, max_steps: int, trains_documents: bool = True) -> RefreshPolicy:
    """Return the policy of a training of `max_steps` steps. Frozen documents are never refreshed."""
    if not trains_documents:
        return RefreshPolicy(max_steps + 1, 0, max_steps + 1, max_steps)
    lag = max(1, keys.every_steps // 2) if keys.lag_steps is None else keys.lag_steps
    return RefreshPolicy(keys.every_steps, lag, INTERVALS_TO_STOP * keys.every_steps, max_steps)
