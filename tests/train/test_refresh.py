"""When indexes are built and adopted, against a service whose builds end when the test says so."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from replug.config.errors import Interrupted, RunError
from replug.config.refresh_policy import RefreshPolicy
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import Refreshed
from replug.train.development import DevResult
from replug.train.refresh import RefreshController
from replug.train.step_metrics import StepClock


def refreshed(version: int) -> Refreshed:
    """Numbers that differ from version to version."""
    return Refreshed(0.9, 1 / (1 + version), 2.0 + version)


class FakeService:
    """Records what it is asked for; `builds[version]` is the future of that refresh, `previous` what it is beside."""

    def __init__(self) -> None:
        self.builds: dict[int, Future] = {}
        self.built: list[int] = []
        self.prepared: list[int] = []
        self.committed: list[int] = []
        self.previous: dict[int, int] = {}
        self.store = SimpleNamespace(plan=lambda version: version, pending_plan=lambda version: version)

    def build(self, version: int) -> Future:
        self.built.append(version)
        return _done(version)

    def refresh(self, version: int, previous: int) -> Future:
        self.builds[version] = Future()
        self.previous[version] = previous
        return self.builds[version]

    def prepare(self, version: int) -> None:
        self.prepared.append(version)

    def commit(self, version: int) -> None:
        self.committed.append(version)


def result_of(index: IndexState) -> DevResult:
    return DevResult(index.step, 2.0 - index.version / 10, 1.0)


def measured_at_once(index: IndexState, ready: Future) -> Future:
    """Measure as soon as the version is ready."""
    result: Future = Future()
    ready.add_done_callback(lambda built: result.set_result(None if built.exception() else result_of(index)))
    return result


def controller(
    service: FakeService,
    lag: int = 3,
    max_age: int = 30,
    publish: Callable[[IndexState], int] = lambda index: index.version,
    measure_index: Callable[[IndexState, Future], Future] = measured_at_once,
) -> RefreshController:
    policy = RefreshPolicy(10, lag, max_age, 100)
    return RefreshController(service, policy, publish, measure_index, StepClock())


def walk(control: RefreshController, service: FakeService, steps: range, ready: bool = True) -> list[int]:
    """The live version at each boundary; builds end at once if `ready`."""
    versions = []
    for step in steps:
        for version, build in service.builds.items():
            if ready and not build.done():
                build.set_result(refreshed(version))
        control.at_boundary(step)
        versions.append(control.live.version)
    return versions


@pytest.mark.parametrize("works", [True, False])
def test_a_failed_refresh_leaves_the_live_index_until_it_is_too_old_and_a_resumed_run_waits_for_a_new_one(works):
    service = FakeService()
    control = controller(service, max_age=15)
    control.at_boundary(10)
    service.builds[1].set_exception(OSError("disk full"))
    assert walk(control, service, range(11, 16)) == [0] * 5
    with pytest.raises(RunError, match=r"16 steps old.*refresh\.every_steps \(15\).*disk full"):
        control.at_boundary(16)
    service = FakeService()
    resumed = controller(service, max_age=15)
    resumed.restore(control.state())
    service.refresh = lambda version, previous: _done(version) if works else _failed("still full")
    if works:
        assert resumed.at_boundary(16) and resumed.live == IndexState(1, 16)
        walk(resumed, service, range(17, 24))
        assert resumed.live == IndexState(2, 20)
    else:
        with pytest.raises(RunError, match=r"step 16: .*still full"):
            resumed.at_boundary(16)
        assert resumed.num_failed == 2


def test_a_restored_controller_resumes_the_refresh_under_way():
    service = FakeService()
    control = controller(service)
    walk(control, service, range(12), ready=False)
    assert control.versions_in_use() == {0, 1}
    other = FakeService()
    resumed = controller(other)
    resumed.restore(control.state())
    assert other.built == other.prepared == [0] and list(other.builds) == [1]
    assert walk(resumed, other, range(12, 16)) == [0, 1, 1, 1]


def test_a_snapshot_that_cannot_be_written_is_a_failed_refresh_and_training_continues():
    service, failing = FakeService(), [True]

    def publish(index: IndexState) -> int:
        if failing[0]:
            raise RunError("model.safetensors.partial cannot be written")
        return index.version

    control = controller(service, publish=publish)
    walk(control, service, range(15))
    assert (control.num_failed, control.live.version, list(service.builds)) == (1, 0, [])
    failing[0] = False
    assert walk(control, service, range(15, 25))[-1] == 1
    assert (control.live, control.num_failed) == (IndexState(1, 20), 1)


def test_an_index_of_the_weights_at_a_boundary_is_waited_for_and_made_once():
    service = FakeService()
    service.refresh = lambda version, previous: _done(version)
    control = controller(service)
    for _ in range(2):  # again, as a run does that was interrupted at this boundary
        control.renew(7)
        assert (control.live, control.dev) == (IndexState(1, 7), result_of(IndexState(1, 7)))
    service.refresh = lambda version, previous: _failed("disk full")
    with pytest.raises(RunError, match="step 9: no index of these weights could be built: disk full"):
        control.renew(9)


@pytest.mark.parametrize("error", [RunError("the LM refused"), Interrupted("interrupted by SIGTERM")])
def test_a_version_serves_unmeasured_where_its_measurement_fails_and_waits_where_it_is_interrupted(error, caplog):
    def failing(index: IndexState, ready: Future) -> Future:
        measured: Future = Future()
        ready.add_done_callback(lambda _: measured.set_exception(error))
        return measured

    service = FakeService()
    control = controller(service, measure_index=failing)
    if isinstance(error, Interrupted):
        with pytest.raises(Interrupted):
            walk(control, service, range(14))
        assert control.live.version == 0 and control.state()["pending_version"] == 1
        return
    walk(control, service, range(14))
    assert (control.live, control.dev, control.num_failed) == (IndexState(1, 10), None, 0)
    assert "index v1 could not be measured on development texts: the LM refused" in caplog.text


def _done(version: int) -> Future:
    future: Future = Future()
    future.set_result(refreshed(version))
    return future


def _failed(cause: str) -> Future:
    future: Future = Future()
    future.set_exception(OSError(cause))
    return future
