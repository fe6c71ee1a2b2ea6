"""Starting Ray for one run, on loopback, or joining the cluster that `ray.address` names."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import AuthenticationError

from configs.errors import UserError
from configs.schema import Config, ScoreConfig, Swap
from data.progress import say


def actors_needed(config: Config | ScoreConfig) -> dict[str, int]:
    """Actors by the key that sets their number; each takes one logical CPU. A server has none, nor an index alone."""
    actors = {"lm.num_replicas": config.lm.num_replicas} if config.lm.path else {}
    if isinstance(config, Config):
        index = config.index
        versions = 2 if index.swap is Swap.blue_green else 1  # that have searchers of their own during a swap
        actors |= {"index.num_shards": versions * index.num_shards, "index.num_builders": index.num_builders}
    return actors


@contextmanager
def ray_cluster(config: Config | ScoreConfig) -> Iterator[None]:
    """Ray while the block runs. A cluster started here ends with it; one that was joined goes on.

    SIGTERM ends the process at once with status 143, as pre-emption wants; the same command resumes.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if config.ray.address is None:
        _start(config)
    else:
        _join(config)
    # Ray's own handler raises wherever the process stands, where it may be swallowed; all that counts is on disk.
    before = signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()


def _start(config: Config | ScoreConfig) -> None:
    ray.init(
        address="local",  # None would join whatever cluster somebody has started on this machine
        num_cpus=config.ray.num_cpus or sum(actors_needed(config).values()),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=config.ray.object_store_mb * 2**20,
    )


def _join(config: Config | ScoreConfig) -> None:
    try:
        _require_answer(str(config.ray.address))
        ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, AuthenticationError) as error:
        raise UserError(
            f"ray.address: cannot join a cluster at {config.ray.address}: {str(error).splitlines()[0]}; start one with "
            "`ray start --head`, or leave ray.address out"
        ) from error
    _require_room(ray.cluster_resources().get("CPU", 0), actors_needed(config))


def _require_room(available: float, actors: dict[str, int]) -> None:
    """Room for all but further scorers, which join when a node does."""
    least = {**actors, **({"lm.num_replicas": 1} if "lm.num_replicas" in actors else {})}
    if available < sum(least.values()):
        raise UserError(
            f"ray.address: the cluster has {available:g} CPUs, but the actors need {sum(least.values())} "
            f"({' + '.join(least)}; one scorer is enough to begin)"
        )
    if available < sum(actors.values()):
        missing = sum(actors.values()) - available
        say(f"the cluster has room for all but {missing:g} of {actors['lm.num_replicas']} scorers, which join later")


def _require_answer(address: str) -> None:
    """Raise OSError where nothing listens: Ray itself goes on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
