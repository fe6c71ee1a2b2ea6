"""A Ray cluster on this machine whose nodes and GPUs are numbers, and what runs in it.

Each node has an address of its own on loopback, so that nodes are told apart by it as on real ones.
"""

import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from replug.cluster.gpus import Rehearsal

CPUS_OF_NODE = 64  # logical: each actor takes one
PORTS = range(20_000, 30_000)
OBJECT_STORE_BYTES = 80 << 20  # Ray takes no less


@dataclass(frozen=True, slots=True)
class FakeActor:
    """One actor as the cluster has it; `gpus` are the numbers of those of its node that it has a share of."""

    job: str
    role: str
    node: str
    pid: int
    gpus: tuple[int, ...]
    is_up: bool
    was_up: bool  # now or before


class FakeCluster:
    """`nodes` with `gpus` each, started now; the first is the driver's."""

    def __init__(self, rehearsal: Rehearsal, nodes: int) -> None:
        from ray.cluster_utils import Cluster  # reads the environment, which is set by now

        port = _free_port()
        self.address = f"{_host(0)}:{port}"
        room = {"num_cpus": CPUS_OF_NODE, "num_gpus": rehearsal.gpus_of_node, "object_store_memory": OBJECT_STORE_BYTES}
        room["include_log_monitor"] = False  # nobody reads the workers' logs: a process less for each node
        head = {"gcs_server_port": port, "include_dashboard": False, "no_monitor": True}
        self._cluster = Cluster(initialize_head=True, head_node_args={**room, **head, "node_ip_address": _host(0)})
        for number in range(1, nodes):
            self._cluster.add_node(wait=False, node_ip_address=_host(number), **room)
        self._cluster.wait_for_nodes()

    def actors(self) -> list[FakeActor]:
        """Those that are there, wait for room or have ended."""
        from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

        table = self._cluster.global_state._connect_and_get_accessor().get_actor_table(None, None)
        return [_actor(ActorTableData.FromString(row)) for row in table]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def fake_cluster(nodes: int, gpus: int, memory_gb: float) -> Iterator[FakeCluster]:
    """The cluster while the block runs, and the environment of its processes, which is as before at the end."""
    rehearsal = Rehearsal(gpus, memory_gb)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        _environment(rehearsal, folder),
    ):
        cluster = FakeCluster(rehearsal, nodes)
        try:
            yield cluster
        finally:
            cluster.close()


@contextmanager
def _environment(rehearsal: Rehearsal, folder: str) -> Iterator[None]:
    """Ray's files lie in a folder where no other Ray looks for a cluster."""
    before = dict(os.environ)
    os.environ.update({**rehearsal.environment(), "RAY_TMPDIR": folder})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _free_port() -> int:
    """Not of those that the system gives to connections: one may be taken before the cluster listens on it."""
    while True:
        with suppress(OSError), socket.socket() as listener:
            port = random.choice(PORTS)
            listener.bind(("", port))
            return port


def _host(number: int) -> str:
    return f"127.0.0.{number + 2}"


def _actor(row: Any) -> FakeActor:
    from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

    # In a placement group a share has the group's own names, of the same numbers.
    entries = (entry for entry in row.resource_mapping if entry.name == "GPU" or entry.name.startswith("GPU_group_"))
    gpus = tuple(sorted({share.index for entry in entries for share in entry.resource_ids}))
    return FakeActor(
        row.job_id.hex(),
        row.class_name,
        row.address.ip_address,
        row.pid,
        gpus,
        row.state == ActorTableData.ALIVE,
        row.start_time > 0,
    )
