"""When indexes are built and adopted, against a service whose builds end when the test says so."""

from concurrent.futures import Future

import pytest

from train.pipeline import IndexState
from train.refresh import RefreshController, RefreshPolicy, StaleIndexError


class FakeService:
    """Records what it is asked for; `builds[version]` is the future of that build."""

    def __init__(self) -> None:
        self.builds: dict[int, Future] = {}
        self.prepared: list[int] = []
        self.released: list[list[int]] = []
        self.store = self

    def build(self, version: int) -> Future:
        self.builds[version] = Future()
        return self.builds[version]

    def pending_plan(self, version: int) -> int:
        return version

    def prepare(self, version: int) -> None:
        self.prepared.append(version)

    def release_all_but(self, versions: list[int]) -> None:
        self.released.append(versions)


def controller(service: FakeService, lag: int | None = 3, every: int = 10, max_age: int = 30, max_steps: int = 100):
    policy = RefreshPolicy(every, lag, max_age, max_steps)
    return RefreshController(service, policy, lambda index: index.version)


def walk(control: RefreshController, service: FakeService, steps: range, ready: bool = True) -> list[int]:
    """The live version at each boundary; builds end at once if `ready`."""
    versions = []
    for step in steps:
        for build in service.builds.values():
            if ready and not build.done():
                build.set_result(None)
        control.at_boundary(step)
        versions.append(control.live.version)
    return versions


def test_an_index_is_adopted_exactly_lag_steps_after_its_trigger():
    service = FakeService()
    control = controller(service)
    versions = walk(control, service, range(30))
    assert versions == [0] * 13 + [1] * 10 + [2] * 7
    assert control.live == IndexState(2, 20)
    assert service.prepared == [1, 2] and service.released == [[1], [2]]


def test_sync_refresh_serves_the_weights_of_the_step_itself():
    service = FakeService()
    control = controller(service, lag=0)
    service.build = lambda version: _done()
    versions = [control.at_boundary(step) and control.live.version for step in range(21)]
    assert versions[10] == 1 and versions[20] == 2
    assert control.live == IndexState(2, 20)


def test_when_ready_adopts_at_the_first_boundary_after_the_build():
    service = FakeService()
    control = controller(service, lag=None)
    walk(control, service, range(17), ready=False)
    assert control.live.version == 0
    service.builds[1].set_result(None)
    control.at_boundary(17)
    assert control.live == IndexState(1, 10)


def test_a_late_refresh_is_skipped_and_not_queued():
    service = FakeService()
    control = controller(service, lag=None)
    walk(control, service, range(25), ready=False)
    assert list(service.builds) == [1]
    assert control.num_skipped == 1


def test_a_failed_refresh_leaves_the_live_index_until_it_is_too_old():
    service = FakeService()
    control = controller(service, max_age=15)
    control.at_boundary(10)
    service.builds[1].set_exception(OSError("disk full"))
    for step in range(11, 16):
        control.at_boundary(step)
        assert control.live.version == 0
    with pytest.raises(StaleIndexError, match=r"16 steps old.*refresh\.max_age_steps \(15\).*disk full"):
        control.at_boundary(16)


def test_a_refresh_that_works_again_ends_the_alarm():
    service = FakeService()
    control = controller(service, max_age=25)
    control.at_boundary(10)
    service.builds[1].set_exception(OSError("disk full"))
    walk(control, service, range(11, 40))
    assert control.live.version >= 1


def test_no_refresh_is_started_that_would_come_after_the_last_step():
    service = FakeService()
    control = controller(service, max_steps=22)
    walk(control, service, range(22))
    assert list(service.builds) == [1]


def test_a_restored_controller_goes_on_with_the_refresh_under_way():
    service = FakeService()
    control = controller(service)
    walk(control, service, range(12), ready=False)
    state = control.state()
    assert control.versions_in_use() == {0, 1}

    other = FakeService()
    resumed = controller(other)
    resumed.restore(state)
    assert other.prepared == [0] and list(other.builds) == [1]
    assert walk(resumed, other, range(12, 16)) == [0, 1, 1, 1]
    assert resumed.next_version() == 2


def _done() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future
