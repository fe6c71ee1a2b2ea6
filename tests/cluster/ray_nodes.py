"""A Ray cluster of several nodes on this machine, whose nodes can be killed whole, and what is alive of it.

Run as a script it is that cluster, told what to do on standard input; `RayCluster` starts and drives it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any, Self

import psutil

# Ray asks a node every few seconds whether it lives, and several times before it believes that it does not.
QUICK_DEATHS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
MARK = "REPLUG_TEST_CLUSTER"  # in the environment of every process of a cluster, also of those whose parent is gone
ACTORS = ("Builder", "Searcher", "Scorer")


class RayCluster:
    """A head with room for one actor, which is where drivers connect, and `nodes` others with room for three each."""

    def __init__(self, nodes: int = 2) -> None:
        self._mark, self._folder = uuid.uuid4().hex, tempfile.mkdtemp(prefix="ray-")
        own_folder = {"RAY_TMPDIR": self._folder}  # else every `ray.init` on this machine would join this cluster
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**_environment(), **QUICK_DEATHS, "RAY_AUTH_MODE": "disabled", MARK: self._mark, **own_folder},
        )
        self.address = self._answer()

    def kill_node(self, number: int) -> None:
        """Kill -9 of one node's raylet and everything under it."""
        self._tell(f"kill {number}")

    def add_node(self) -> None:
        self._tell("add")

    def actors(self, kind: str) -> list[psutil.Process]:
        """Live processes of actors of one kind, in the order of their ids."""
        return [process for process, name in _named(self.processes()) if name.startswith(f"ray::{kind}")]

    def processes(self) -> list[psutil.Process]:
        """Every live process that this cluster ever started, its own included."""
        return [process for process in psutil.process_iter() if _marked(process, self._mark)]

    def close(self) -> list[str]:
        """End the cluster; returns the names of the processes that were still there some seconds later, now killed."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):  # closed already, or dead
            self._process.communicate("stop\n", timeout=60)
        end = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        names = [name for _, name in _named(left)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)
        return names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray may say something in between
            if line.startswith("answer "):
                return line.split()[1]
        raise AssertionError("the cluster's own process ended")


def _environment() -> dict[str, str]:
    """Without what the tests tell the Ray of their own: to keep to loopback, where a run that joins does not look."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _marked(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK) == mark
    return False


def _named(processes: list[psutil.Process]) -> Iterator[tuple[psutil.Process, str]]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield process, " ".join(process.cmdline())


def _serve(nodes: int) -> None:
    from ray.cluster_utils import Cluster

    room: dict[str, Any] = {"object_store_memory": 10**8, "include_log_monitor": False}  # nobody reads their logs
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **room})
    others = [cluster.add_node(num_cpus=3, **room) for _ in range(nodes)]
    print(f"answer {cluster.address}", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "kill":
            node = others.pop(int(arguments[0]))
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            for process in [raylet, *raylet.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            cluster.remove_node(node, allow_graceful=False)
        elif command == "add":
            others.append(cluster.add_node(num_cpus=3, **room))
        else:
            break
        print("answer done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
