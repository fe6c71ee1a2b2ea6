"""Seconds of work are added up by device and role, and a process knows its devices."""

from replug.cluster.device_use import Busy, DeviceUse, devices_of


def test_seconds_add_up_by_device_and_role_and_are_taken_once() -> None:
    use = DeviceUse()
    for role, busy in (("score", Busy(2.0, ("a:0",))), ("score", Busy(1.0, ("a:0", "a:1"))), ("embed", Busy(4.0, ()))):
        use.note(role, busy)
    assert use.take() == {"a:0": {"score": 3.0}, "a:1": {"score": 1.0}}
    assert use.take() == {}


def test_a_process_without_a_gpu_works_on_its_nodes_processors() -> None:
    assert devices_of("a", ["0", "1"]) == ("a:0", "a:1")
    assert devices_of("a", []) == ("a:cpu",)
