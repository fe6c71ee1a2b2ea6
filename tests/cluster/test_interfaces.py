"""gloo and NCCL use the interface by which Ray reaches a node."""

import os
from types import SimpleNamespace

import psutil
import pytest

from replug.cluster.environment import VARIABLES, interface_of, use_interface_of

ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["192.168.0.7", "fe80::1"], "ib0": ["10.1.0.7"]}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with three interfaces, on which nobody has chosen any."""
    known = {name: [SimpleNamespace(address=one) for one in found] for name, found in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("address", "name"), [("10.1.0.7", "ib0"), ("127.0.0.1", "lo"), ("10.1.0.8", None)])
def test_the_interface_is_that_of_the_nodes_address(address, name):
    assert interface_of(address) == name


def test_both_libraries_are_told_and_what_a_user_has_set_stays():
    use_interface_of("10.1.0.7")
    assert [os.environ[name] for name in VARIABLES] == ["ib0", "=ib0"]
    use_interface_of("192.168.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
