"""Preparing over a Ray cluster: the same work as `data.prepare.local_pool` does.

Any node that sees the same files takes part.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray

from replug.cluster.ray_cluster import ray_cluster
from replug.configs.schema import Config
from replug.data.prepare.local_pool import Job


class RayPool:
    """Up to `num_workers` tasks at a time, one core each. A task whose node is lost is run again elsewhere."""

    def __init__(self, config: Config, num_workers: int) -> None:
        self._cluster, self._num_workers = ray_cluster(config, roles=()), num_workers

    def __enter__(self) -> "RayPool":
        self._cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def run(self, function: Callable, jobs: Iterable[Job]) -> Iterator[Any]:
        task = ray.remote(num_cpus=1, max_retries=5)(function)
        drawn = iter(jobs)
        running: list[ray.ObjectRef] = []
        while True:
            while len(running) < self._num_workers and (job := next(drawn, None)) is not None:
                running.append(task.remote(*job))
            if not running:
                return
            done, running = ray.wait(running)
            yield from ray.get(done)
