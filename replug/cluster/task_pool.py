"""Tasks over a Ray cluster: preparing, as `data.prepare.local_pool` does it.

Any node that sees the same files takes part.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from replug.cluster.ray_cluster import ray_cluster
from replug.config.schema import Config
from replug.data.prepare.local_pool import Job


def _in_folder(folder: Path, function: Callable, *job: Any) -> Any:
    """Where the command runs, which paths without a folder are of; a worker of a joined cluster runs elsewhere."""
    with contextlib.chdir(folder):
        return function(*job)


class RayPool:
    """Run up to `num_workers` tasks at a time, with one core each; a task whose node is lost runs again elsewhere."""

    def __init__(self, config: Config, num_workers: int) -> None:
        self._cluster = ray_cluster(config, roles=(), num_tasks=num_workers)
        self._num_workers = num_workers

    def __enter__(self) -> "RayPool":
        self._cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def run(self, function: Callable, jobs: Iterable[Job]) -> Iterator[Any]:
        task = ray.remote(num_cpus=1, max_retries=5)(_in_folder)
        task, here = task.options(name=function.__name__), Path.cwd()
        drawn = iter(jobs)
        running: list[ray.ObjectRef] = []
        while True:
            while len(running) < self._num_workers and (job := next(drawn, None)) is not None:
                running.append(task.remote(here, function, *job))
            if not running:
                return
            done, running = ray.wait(running)
            yield from ray.get(done)
