"""Starting Ray for one run, on loopback, or joining the cluster that `ray.address` names."""

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import ray
import torch
from ray._private.services import find_gcs_addresses  # what ray.init itself looks for `auto` by
from ray.exceptions import AuthenticationError

from replug.cluster import layout
from replug.cluster.interruption import Interruption
from replug.configs.errors import UserError
from replug.configs.schema import Config, ScoreConfig

log = logging.getLogger(__name__)


CODE = Path(__file__).parents[2]  # the folder that workers import `replug` from
ANSWER_SECONDS = 10.0
AnyConfig = TypeVar("AnyConfig", Config, ScoreConfig)


@contextmanager
def ray_cluster(
    config: AnyConfig, roles: Collection[str] = layout.ROLES, interruption: Interruption | None = None
) -> Iterator[AnyConfig]:
    """Ray while the block runs. A cluster started here ends with it; one that was joined goes on.

    Yields the configuration with `resources` laid out on the cluster, which has room for the actors of the roles.
    A signal ends the process at once, unless the interruption is deferred; the same command resumes.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        laid_out = (_start if config.ray.address is None else _join)(config, roles)
        with (interruption or Interruption()).installed():  # Ray's own handler raises wherever the process stands
            yield laid_out
    finally:
        ray.shutdown()


def _start(config: AnyConfig, roles: Collection[str]) -> AnyConfig:
    num_gpus = torch.cuda.device_count()
    laid_out = _lay_out(config, num_gpus)
    wanted = layout.needs(laid_out, roles, layout.trains_on_gpu(config, num_gpus > 0))
    num_cpus = max(1, layout.logical_cpus(wanted))
    _require_room("ray", [layout.Node("this machine", num_cpus, num_gpus)], wanted)
    ray.init(
        address="local",  # None would join whatever cluster somebody has started on this machine
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=layout.OBJECT_STORE_BYTES,
    )
    return laid_out


def _join(config: AnyConfig, roles: Collection[str]) -> AnyConfig:
    address = str(config.ray.address)
    try:
        _require_answer(address)
        with contextlib.chdir(CODE):  # Ray puts the driver's folder first where its workers import from
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, AuthenticationError) as error:
        raise UserError(_why_not(address, error)) from error
    nodes = list(layout.nodes_of(ray.nodes()))
    laid_out = _lay_out(config, int(sum(node.gpus for node in nodes)))
    on_gpu = layout.trains_on_gpu(config, torch.cuda.device_count() > 0)
    _require_room("ray.address", nodes, layout.needs(laid_out, roles, on_gpu))
    return laid_out


def _why_not(address: str, error: Exception) -> str:
    """One line: Ray says the same of a wrong token as of a cluster that is gone."""
    start = f"ray.address: cannot join a cluster at {address}: {str(error).splitlines()[0]}"
    if isinstance(error, AuthenticationError) or "Failed to connect" in str(error):
        mode, path = os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN_PATH")
        return (
            f"{start}; something answers there, so the token may be another or have expired: expected that cluster's "
            f"own (RAY_AUTH_MODE is {mode}, RAY_AUTH_TOKEN_PATH {path or 'not set'})"
        )
    return f"{start}; start one with `ray start --head`, or leave ray.address out"


def _lay_out(config: AnyConfig, num_gpus: int) -> AnyConfig:
    return layout.lay_out(config, num_gpus) if isinstance(config, Config) else config  # type: ignore[return-value]


def _require_room(key: str, nodes: list[layout.Node], wanted: list[layout.Need]) -> None:
    """Room for all but further scorers, which join when a node does."""
    problem = layout.shortage(nodes, wanted)
    if problem:
        raise UserError(f"{key}: {problem}; ask for fewer, or add nodes")
    if late := layout.latecomers(nodes, wanted):
        log.info(f"the cluster has room for all but {late} scorers, which join later")


def _require_answer(address: str) -> None:
    """Raise OSError where nothing listens, or nothing that speaks as Ray does: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return _require_one_cluster()
    socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            return grpc.channel_ready_future(channel).result(timeout=ANSWER_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise OSError(f"what listens there is no Ray ({ANSWER_SECONDS:g} s without an answer)") from error


def _require_one_cluster() -> None:
    """Raise OSError where `auto` would have to guess."""
    found = sorted(find_gcs_addresses())
    if len(found) > 1:
        raise OSError(f"{len(found)} clusters run on this machine; expected the address of one: {', '.join(found)}")
