"""Wait until so many nodes have joined the Ray cluster at HOST:PORT.

    python -m replug.slurm.wait_for_nodes HOST:PORT NODES

Ray itself goes on trying for minutes where nothing listens yet, so the port is asked first. `slurm.ray_job` sets the
limit.
"""

import contextlib
import logging
import socket
import sys
import time

import ray

LOOK_SECONDS = 0.3


def main() -> None:
    address, wanted = sys.argv[1], int(sys.argv[2])
    host, _, port = address.rpartition(":")
    while not answers(host, int(port)):
        time.sleep(LOOK_SECONDS)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    while sum(node["Alive"] for node in ray.nodes()) < wanted:
        time.sleep(LOOK_SECONDS)


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=5).close()
        return True
    return False


if __name__ == "__main__":
    main()
