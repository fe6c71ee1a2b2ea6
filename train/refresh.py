"""When the corpus is re-embedded, and when the new index takes over: decided at step boundaries only.

A refresh starts at every multiple of `every_steps`. `at_lag` adopts it exactly `lag_steps` later, waiting if it is
not ready, so that two runs see the same index at the same step whatever the workers' speed. A refresh that
failed leaves the live index serving, up to `max_age_steps`; one that is due while another is under way
is skipped, never queued.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import RunError
from data.progress import say
from index_workers.service import IndexService, Refreshed
from index_workers.version_store import BuildPlan
from index_workers.watch import Measures
from train.pipeline import IndexState


class StaleIndexError(RunError):
    """The index is older than `refresh.max_age_steps` allows, because refreshes failed."""


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """`lag_steps` None adopts a refresh as soon as it is ready."""

    every_steps: int
    lag_steps: int | None
    max_age_steps: int
    max_steps: int

    def starts_at(self, step: int) -> bool:
        """At every multiple of `every_steps`, unless training ends before the new index would be adopted."""
        return step > 0 and step % self.every_steps == 0 and step + (self.lag_steps or 0) < self.max_steps


@dataclass(slots=True)
class _Pending:
    index: IndexState
    ready: "Future[Refreshed]"


@dataclass(frozen=True, slots=True)
class Swap:
    """One hot swap, for metrics: how long the boundary waited for the refresh, and for the switch itself."""

    wait_seconds: float = 0.0
    switch_ms: float = 0.0


class RefreshController:
    """Owns which index version is live. `publish(version, step)` snapshots the weights and plans the build."""

    def __init__(
        self, service: IndexService, policy: RefreshPolicy, publish: Callable[[IndexState], BuildPlan]
    ) -> None:
        self._service, self._policy, self._publish = service, policy, publish
        self.live = IndexState(version=0, step=0)
        self._pending: _Pending | None = None
        self._last_error: BaseException | None = None
        self.last, self.last_swap = Refreshed(Measures(), 0.0, 0.0), Swap()  # those of the live version
        self.num_skipped = self.num_failed = 0

    def at_boundary(self, step: int) -> Swap | None:
        """Adopt what is due, start what is due, and refuse to go on with an index that is too old."""
        swap = self._adopt(step)
        if self._policy.starts_at(step):
            self._trigger(step)
            if self._policy.lag_steps == 0:
                swap = self._adopt(step)
        self._check_age(step)
        return swap

    def start(self) -> None:
        """Serve version 0, and measure it: what a lossy kind finds is not what exact search would."""
        self.last = self._service.refresh(self._service.store.plan(0), previous=0).result()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the live version and the refresh under way."""
        pending = self._pending.index if self._pending else None
        return {
            "live_version": self.live.version,
            "live_step": self.live.step,
            "pending_version": pending.version if pending else None,
            "pending_step": pending.step if pending else None,
            "last": asdict(self.last),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Serve the checkpoint's version again and go on with the refresh that was under way."""
        self.live = IndexState(int(state["live_version"] or 0), int(state["live_step"] or 0))
        self.last = Refreshed(**{**state["last"], "measures": Measures(**state["last"]["measures"])})
        self._service.build(self._service.store.pending_plan(self.live.version)).result()  # a file that is gone
        self._service.prepare(self.live.version)
        if state["pending_version"] is not None and state["pending_step"] is not None:
            pending = IndexState(state["pending_version"], state["pending_step"])
            plan = self._service.store.pending_plan(pending.version)
            self._pending = _Pending(pending, self._service.refresh(plan, self.live.version))

    @property
    def is_under_way(self) -> bool:
        """Whether a version is being built now."""
        return self._pending is not None and not self._pending.ready.done()

    def next_version(self) -> int:
        """The number of the version after training, once nothing is being built any more."""
        if self._pending is None:
            return self.live.version + 1
        self._pending.ready.exception()
        return self._pending.index.version + 1

    def versions_in_use(self) -> set[int]:
        """Versions to keep on disk: the live one and the one before, and that of the refresh under way."""
        pending = {self._pending.index.version} if self._pending else set()
        return {self.live.version, max(0, self.live.version - 1)} | pending

    def _trigger(self, step: int) -> None:
        if step in (self.live.step, self._pending.index.step if self._pending else None):
            return  # a run that stopped after this boundary was resumed at it
        if self._pending is not None:
            self.num_skipped += 1
            say(f"step {step}: skipping a refresh, v{self._pending.index.version} is still being built")
            return
        index = IndexState(self.live.version + 1, step)
        try:
            ready = self._service.refresh(self._publish(index), self.live.version)
        except (OSError, RunError) as error:  # a full disk, say
            self._fail(step, index, error)
        else:
            self._pending = _Pending(index, ready)

    def _adopt(self, step: int) -> Swap | None:
        if self._pending is None or not self._is_due(self._pending, step):
            return None
        pending, self._pending = self._pending, None
        start = time.monotonic()
        error = pending.ready.exception()
        if error is not None:
            self._fail(step, pending.index, error)
            return None
        self._last_error = None
        return self._switch(pending, waited=time.monotonic() - start)

    def _fail(self, step: int, index: IndexState, error: BaseException) -> None:
        self._last_error = error
        self.num_failed += 1
        say(f"step {step}: refresh v{index.version} failed, going on with v{self.live.version}: {error}")

    def _is_due(self, pending: _Pending, step: int) -> bool:
        lag = self._policy.lag_steps
        if lag is None:  # as soon as it is ready, and no later than the age limit
            return pending.ready.done() or step - self.live.step >= self._policy.max_age_steps
        return step >= pending.index.step + lag

    def _switch(self, pending: _Pending, waited: float) -> Swap:
        start = time.monotonic()
        self.live, self.last = pending.index, pending.ready.result()
        self._service.commit(self.live.version)
        self.last_swap = Swap(waited, 1000 * (time.monotonic() - start))
        return self.last_swap

    def _check_age(self, step: int) -> None:
        age = step - self.live.step
        if self._last_error is not None and age > self._policy.max_age_steps:
            raise StaleIndexError(
                f"step {step}: index v{self.live.version} is {age} steps old, more than refresh.max_age_steps "
                f"({self._policy.max_age_steps}), because its refresh failed: {self._last_error}"
            ) from self._last_error
