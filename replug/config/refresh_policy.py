"""When the corpus is re-embedded and when the new index takes over. Pure: steps in, decisions out.

Training, the check of a configuration and `replug plan` all ask this module. A refresh starts at every
multiple of `every_steps`. One that is due to start while another is under way is skipped, never queued. What differs
between policies is when a refresh is adopted. To add a policy: a name in `Adopt`, a class, a line in `POLICIES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Adopt(Enum):
    at_lag = "at_lag"
    when_ready = "when_ready"


class Start(Enum):
    """What becomes of a refresh at a step boundary."""

    nothing = "nothing"  # none is to start here
    begin = "begin"
    skip = "skip"  # one is to start, but another is under way


@dataclass(frozen=True, slots=True)
class RefreshPolicy(ABC):
    """With `lag_steps` 0 training waits for the new index."""

    every_steps: int
    lag_steps: int
    max_age_steps: int
    max_steps: int

    @property
    @abstractmethod
    def fixed_lag(self) -> int | None:
        """Steps from start to adoption; None where they depend on how long the work takes."""

    @abstractmethod
    def is_due(self, step: int, live_step: int, pending_step: int, is_ready: bool) -> bool:
        """Whether a refresh is adopted at this boundary. Training waits for one that is due and not ready."""

    @property
    def adopts_at_start(self) -> bool:
        """Whether training waits at the boundary that a refresh starts at, and adopts it there."""
        return self.fixed_lag == 0

    def starts_at(self, step: int) -> bool:
        """At every multiple of `every_steps`, unless training ends before the new index would be adopted."""
        return step > 0 and step % self.every_steps == 0 and step + (self.fixed_lag or 0) < self.max_steps

    def start(self, step: int, live_step: int, pending_step: int | None) -> Start:
        """`live_step` and `pending_step` are those of the weights in the live index and in the one under way."""
        if not self.starts_at(step) or step in (live_step, pending_step):
            return Start.nothing  # equal: the run stopped after this boundary and was resumed at it
        return Start.begin if pending_step is None else Start.skip

    def is_too_old(self, step: int, live_step: int) -> bool:
        """Whether an index that was not refreshed ends the training."""
        return step - live_step > self.max_age_steps

    @property
    def num_starts(self) -> int:
        """Refreshes of a whole run, where none is skipped."""
        return sum(self.starts_at(step) for step in range(0, self.max_steps, self.every_steps))


@dataclass(frozen=True, slots=True)
class AtLag(RefreshPolicy):
    """Adopts exactly `lag_steps` after the start: two runs see the same index at the same step, however fast."""

    @property
    def fixed_lag(self) -> int:
        return self.lag_steps

    def is_due(self, step: int, live_step: int, pending_step: int, is_ready: bool) -> bool:
        return step >= pending_step + self.lag_steps


@dataclass(frozen=True, slots=True)
class WhenReady(RefreshPolicy):
    """Adopts at the first boundary at which the new index is ready, and no later than the age limit."""

    @property
    def fixed_lag(self) -> None:
        return None

    def is_due(self, step: int, live_step: int, pending_step: int, is_ready: bool) -> bool:
        return is_ready or step - live_step >= self.max_age_steps


POLICIES: dict[Adopt, type[RefreshPolicy]] = {Adopt.at_lag: AtLag, Adopt.when_ready: WhenReady}


class RefreshKeys(Protocol):
    """The keys of the section `refresh` that a policy follows from."""

    every_steps: int
    adopt: Adopt
    lag_steps: int | None
    max_age_steps: int | None


def refresh_policy(keys: RefreshKeys, max_steps: int, trains_documents: bool = True) -> RefreshPolicy:
    """The policy of a training of `max_steps` steps. Where documents stay as they are, nothing is ever refreshed."""
    if not trains_documents:
        return POLICIES[keys.adopt](max_steps + 1, 0, max_steps + 1, max_steps)
    return POLICIES[keys.adopt](keys.every_steps, _lag(keys), _max_age(keys), max_steps)


def refresh_problems(keys: RefreshKeys) -> Iterator[str]:
    """What no policy can be made of, with the key and what was expected."""
    lag = _lag(keys)
    if lag < 0 or lag > keys.every_steps:
        yield (
            f"refresh.lag_steps is {lag}; expected 0 to refresh.every_steps ({keys.every_steps}), so that one "
            "refresh is adopted before the next starts"
        )
    if keys.max_age_steps is not None and keys.max_age_steps < keys.every_steps + lag:
        yield (
            f"refresh.max_age_steps is {keys.max_age_steps}; expected at least every_steps + lag_steps "
            f"({keys.every_steps + lag}), the age an index reaches in good health"
        )


def _lag(keys: RefreshKeys) -> int:
    """Half of the distance between two refreshes where nothing is said."""
    return max(1, keys.every_steps // 2) if keys.lag_steps is None else keys.lag_steps


def _max_age(keys: RefreshKeys) -> int:
    return keys.max_age_steps or 3 * keys.every_steps
