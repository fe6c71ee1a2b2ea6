"""The trainer's controller and the simulation of a plan start, adopt and skip refreshes at the same steps."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from replug.config.refresh_policy import POLICIES, Adopt, RefreshPolicy
from replug.index_workers.service import Refreshed
from replug.index_workers.watch import Measures
from replug.planning.simulate import DeviceAllocation, Durations, ScoringSeconds, StageSeconds, simulate
from replug.planning.workload import HeldOut, Lengths, Shape, StepShape
from replug.train import refresh
from replug.train.refresh import RefreshController
from replug.train.step_metrics import StepClock

STEPS, STEP_SECONDS = 60, 10.0
Event = tuple[int, str]


class FakeService:
    """Builds that take `build_seconds` of a clock that stands still but for steps and waits."""

    def __init__(self, build_seconds: float) -> None:
        self.now, self._build_seconds = 0.0, build_seconds
        self._under_way: list[tuple[float, Future]] = []
        self.num_started = self.num_adopted = 0
        self.store = SimpleNamespace(plan=lambda version: version, pending_plan=lambda version: version)

    def refresh(self, version: int, previous: int) -> Future:
        self.num_started += 1
        self._under_way.append((self.now + self._build_seconds, Future()))
        return self._under_way[-1][1]

    def commit(self, version: int) -> None:
        self.num_adopted += 1

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._finish()

    def wait(self) -> None:
        """What the controller calls while it waits: the time until the refresh is there passes at once."""
        self.now = max(self.now, min(ready for ready, _ in self._under_way))
        self._finish()

    def _finish(self) -> None:
        for ready, future in self._under_way:
            if ready <= self.now:
                future.set_result(Refreshed(Measures(), 1.0, 1.0))
        self._under_way = [(ready, future) for ready, future in self._under_way if not future.done()]


def measured_with_the_build(version: int, ready: Future) -> Future:
    measured: Future = Future()
    ready.add_done_callback(lambda _: measured.set_result(None))
    return measured


def events_of_training(policy: RefreshPolicy, build_seconds: float) -> list[Event]:
    service = FakeService(build_seconds)
    control = RefreshController(
        service, policy, lambda index: index.version, measured_with_the_build, StepClock(), check=service.wait
    )
    events: list[Event] = []
    for step in range(STEPS):
        before = (service.num_adopted, service.num_started, control.num_skipped)
        control.at_boundary(step)
        after = (service.num_adopted, service.num_started, control.num_skipped)
        kinds = zip(("adopt", "start", "skip"), before, after, strict=True)
        events += [(step, kind) for kind, old, new in kinds if new > old]
        service.advance(STEP_SECONDS)
    return sorted(events)


def events_of_the_simulation(policy: RefreshPolicy, build_seconds: float) -> list[Event]:
    shape = Shape(
        StepShape(batch_size=1, k=1, depth=0), Lengths(1, 1, 1), 1, 1, policy, HeldOut(0, 0), checkpoint_every=STEPS
    )
    stages = StageSeconds(first_build=100.0, last_build=100.0)
    durations = Durations(0.0, 0.0, ScoringSeconds(0.0, 1), train=STEP_SECONDS, build=build_seconds, stages=stages)
    index = simulate(shape, durations, DeviceAllocation(1)).index
    started = [(refresh.step, "start") for refresh in index.refreshes]
    adopted = [(refresh.adopted_step, "adopt") for refresh in index.refreshes if refresh.adopted_step is not None]
    return sorted([*started, *adopted, *((step, "skip") for step in index.skipped)])


@pytest.mark.parametrize("build_seconds", [0.0, 4.0, 35.0, 61.0, 95.0, 129.0, 1000.0])
@pytest.mark.parametrize(
    ("every", "lag", "max_age"), [(10, 0, 30), (10, 3, 30), (10, 10, 20), (4, 2, 12), (7, 5, 12), (25, 20, 50)]
)
@pytest.mark.parametrize("adopt", Adopt)
def test_training_and_simulation_do_the_same_at_the_same_steps(
    adopt: Adopt, every: int, lag: int, max_age: int, build_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "LOOK_SECONDS", 0)
    policy = POLICIES[adopt](every, lag, max_age, STEPS)
    events = events_of_training(policy, build_seconds)
    assert events == events_of_the_simulation(policy, build_seconds)
    assert (every, "start") in events


def test_a_slow_build_shows_every_kind_of_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "LOOK_SECONDS", 0)
    policy = POLICIES[Adopt.when_ready](4, 2, 12, STEPS)
    kinds = {kind for _, kind in events_of_training(policy, 65.0)}
    assert kinds == {"start", "adopt", "skip"}
