"""Re-embed the corpus and switch to the new index, at step boundaries only.

`config.refresh_policy` chooses the steps; this module acts on them. After a failed refresh the live index keeps
serving, up to three times `refresh.every_steps`. A version serves even if its measurement on development texts failed.
A run that resumes with an index that is too old waits for a new one before its first step.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any

from replug.cluster.interruption import LOOK_SECONDS, wait_for
from replug.config.errors import Interrupted, RunError
from replug.config.refresh_policy import RefreshPolicy
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.service import IndexService, Refreshed
from replug.train.development import DevResult
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """Holds a refresh under way: when it is ready, and its result on development texts."""

    index: IndexState
    ready: "Future[Refreshed]"
    dev: "Future[DevResult | None]"

    @property
    def futures(self) -> "list[Future[Any]]":
        return [self.ready, self.dev]


# Measures a new version on development texts beside the training. The result is None without such texts.
MeasureIndex = Callable[[IndexState, "Future[Refreshed]"], "Future[DevResult | None]"]


class RefreshController:
    """Controls which index version is live. `publish(index)` snapshots the weights and plans the build.

    `before_switch` is called when a version is about to be freed; `check` while a boundary waits for a refresh.
    """

    def __init__(
        self,
        service: IndexService,
        policy: RefreshPolicy,
        publish: Callable[[IndexState], BuildPlan],
        measure_index: MeasureIndex,
        clock: StepClock,
        before_switch: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._service, self._policy, self._publish = service, policy, publish
        self._measure_index, self._clock = measure_index, clock
        self._before_switch, self._check_run = before_switch, check
        self.live = IndexState(version=0, step=0)
        self.dev: DevResult | None = None  # with the live version
        self.adopted_step = 0  # the boundary at which the live version took over
        self._pending: _Pending | None = None
        self._last_error: BaseException | None = None
        self._is_resumed = False
        self.last = Refreshed()  # of the live version
        self.swap_wait_seconds = self.swap_ms = 0.0  # the boundary waited for the refresh, and for the switch itself
        self.num_failed = 0

    def at_boundary(self, step: int) -> bool:
        """Adopt and start the refreshes that are due; returns whether another version is live now.

        Raises RunError if the live index is too old.
        """
        is_resumed, self._is_resumed = self._is_resumed, False
        is_old = self._last_error is not None and self._policy.is_too_old(step, self.live.step)
        is_adopted = (is_resumed and is_old and self._serve_now(step)) or self._adopt(step)
        # A run resumed at a boundary has already started or adopted its refresh.
        if self._policy.starts_at(step) and self._pending is None and step != self.live.step:
            self._start(IndexState(self.live.version + 1, step))
        if self._policy.lag_steps == 0:
            is_adopted = self._adopt(step) or is_adopted
        if self._last_error is not None and self._policy.is_too_old(step, self.live.step):
            raise RunError(
                f"step {step}: index v{self.live.version} is {step - self.live.step} steps old, more than 3 x "
                f"refresh.every_steps ({self._policy.max_age_steps}), because its refresh failed: {self._last_error}"
            ) from self._last_error
        return is_adopted

    def start(self) -> None:
        """Serve version 0, and measure it: a lossy kind retrieves other documents than an exact search."""
        pending = self._begin(IndexState(0, 0), self._service.store.plan(0))
        self.last = wait_for(pending.ready, self._check_run)
        while wait([pending.dev], timeout=LOOK_SECONDS).not_done:
            self._check_run()
        self.dev = _result_of(pending)

    def renew(self, step: int) -> None:
        """Build an index of the current weights, and serve it. Raises RunError if it cannot be built."""
        if self.live.step == step:
            return
        if not self._serve_now(step):
            raise RunError(f"step {step}: no index of these weights could be built: {self._last_error}")

    def state(self) -> dict[str, Any]:
        """Return the live version and the refresh under way, for a checkpoint."""
        pending = self._pending.index if self._pending else None
        return {
            "live_version": self.live.version,
            "live_step": self.live.step,
            "pending_version": pending.version if pending else None,
            "pending_step": pending.step if pending else None,
            "last": asdict(self.last),
            "dev": asdict(self.dev) if self.dev else None,
            "adopted_step": self.adopted_step,
            "num_failed": self.num_failed,
            "last_error": None
            if self._last_error is None
            else str(self._last_error) or type(self._last_error).__name__,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Serve the checkpoint's version again and resume the refresh under way."""
        self.live = IndexState(int(state["live_version"] or 0), int(state["live_step"] or 0))
        self.last = Refreshed(**state["last"])
        self.dev, self.adopted_step = DevResult(**state["dev"]) if state["dev"] else None, state["adopted_step"]
        self.num_failed = state["num_failed"]
        self._last_error = None if state["last_error"] is None else RunError(state["last_error"])
        self._is_resumed = True
        self._service.build(self._service.store.pending_plan(self.live.version)).result()  # rebuilds missing files
        self._service.prepare(self.live.version)
        if state["pending_version"] is not None and state["pending_step"] is not None:
            pending = IndexState(state["pending_version"], state["pending_step"])
            self._pending = self._begin(pending, self._service.store.pending_plan(pending.version))

    @property
    def is_under_way(self) -> bool:
        """Return whether a version is being built now."""
        return self._pending is not None and not self._pending.ready.done()

    def finish(self) -> None:
        """Wait until no version is being built."""
        wait(self._pending.futures if self._pending else [])

    def versions_in_use(self) -> set[int]:
        """Return versions to keep on disk: the live one, the previous one, and that of the refresh under way."""
        pending = {self._pending.index.version} if self._pending else set()
        return {self.live.version, max(0, self.live.version - 1)} | pending

    def _start(self, index: IndexState) -> None:
        try:
            with self._clock.measure("refresh"):  # the weights are written; the workers do the rest
                self._pending = self._begin(index, self._publish(index))
        except (OSError, RunError) as error:  # a full disk, say
            self._fail(index.step, index, error)

    def _begin(self, index: IndexState, plan: BuildPlan) -> _Pending:
        ready = self._service.refresh(plan, self.live.version)
        return _Pending(index, ready, self._measure_index(index, ready))

    def _serve_now(self, step: int) -> bool:
        """Wait for the refresh under way, or for a new one; returns whether its version is live."""
        if self._pending is None:
            self._start(IndexState(self.live.version + 1, step))
        return self._pending is not None and self._adopt_pending(self._pending, step)

    def _adopt(self, step: int) -> bool:
        pending = self._pending
        if pending is None or step < pending.index.step + self._policy.lag_steps:
            return False
        return self._adopt_pending(pending, step)

    def _adopt_pending(self, pending: _Pending, step: int) -> bool:
        begun = time.monotonic()
        with self._clock.measure("wait_index"):  # until version and measurement are there
            while wait(pending.futures, timeout=LOOK_SECONDS).not_done:
                self._check_run()
        if (error := pending.ready.exception()) is not None:
            self._pending = None
            self._fail(step, pending.index, error)
            return False
        result, ended = _result_of(pending), time.monotonic()
        self._before_switch()  # nothing has changed yet: an interruption until here ends the run at this step
        self.live, self.last = pending.index, pending.ready.result()
        self.dev, self.adopted_step = result, step
        self._pending = self._last_error = None
        self._service.commit(self.live.version)
        self.swap_wait_seconds, self.swap_ms = ended - begun, 1000 * (time.monotonic() - ended)
        return True

    def _fail(self, step: int, index: IndexState, error: BaseException) -> None:
        self._last_error = error
        self.num_failed += 1
        log.warning(f"step {step}: refresh v{index.version} failed, v{self.live.version} stays live: {error}")


def _result_of(pending: _Pending) -> DevResult | None:
    """Return the development result of a version, or None after logging a failure. Raises Interrupted.

    A lasting failure of the LM ends the run by the next batch.
    """
    try:
        return pending.dev.result()
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a failed measurement must not end the training
        log.warning(f"index v{pending.index.version} could not be measured on development texts: {error}")
        return None
