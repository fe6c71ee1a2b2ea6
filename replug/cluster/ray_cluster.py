"""Start Ray for one run, on loopback, join the cluster that `ray.address` names, or use the one of this process.

`require_seen_by_all` checks before actors start that every node of a joined cluster sees the run's files: without a
shared file system an actor on another node would fail at its first file, hours into a run.
"""

import contextlib
import logging
import math
import os
import secrets
import select
import shlex
import socket
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import ray
import torch
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from replug.cluster import layout, places
from replug.cluster.background import wait_for_ray_threads
from replug.cluster.environment import private_folder
from replug.cluster.interruption import EXIT_STATUS, Interruption, kill, ray_children
from replug.cluster.layout import ROLES, Layout, Node, Sizes
from replug.config.errors import UserError
from replug.config.schema import Config

log = logging.getLogger(__name__)

CODE = Path(__file__).parents[2]  # the folder that workers import `replug` from
ANSWER_SECONDS = 10.0
SECONDS_FOR_AGENTS = 120  # to start; Ray's default is 15 s
LOOK_SECONDS = 60.0  # for a node to start a process that checks files


def require_seen_by_all(written: Path, read: Collection[Path]) -> None:
    """Raise UserError naming each other node with room for actors that misses a file, and the file.

    Each node looks for a new file in the folder `written`, and for the files and folders `read`.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here and node["Resources"].get("CPU")]
    if not others:
        return

    def missing(names: list[str]) -> list[str]:  # travels by value: a node may not have this module
        return [name for name in names if not os.path.exists(name)]  # noqa: PTH110

    written.mkdir(parents=True, exist_ok=True)
    new = written / f"seen-{secrets.token_hex(8)}"  # new: file systems cache missing names for a while
    new.touch()
    problems = []
    try:
        names = [str(path.absolute()) for path in (new, *read)]
        look = ray.remote(num_cpus=0)(missing)
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in others]
        looks = [look.options(scheduling_strategy=there).remote(names) for there in strategies]
        for node, answer in zip(others, looks, strict=True):
            address = node["NodeManagerAddress"]
            try:
                unseen = ray.get(answer, timeout=LOOK_SECONDS)
            except RayError as error:  # it has just left, or is busy
                log.warning(f"node {address} does not answer whether it sees {written} ({type(error).__name__})")
            else:
                problems += [f"node {address} does not see {path}" for path in unseen]
    finally:
        new.unlink()
    if problems:
        raise UserError(
            f"ray.address: {'; '.join(problems)}; put run_dir, data and models where all nodes see them by the same "
            "path, or take the node out of the cluster"
        )


def this_node() -> Node:
    """Describe this machine, with logical CPUs for any number of actors."""
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Node("this machine", math.inf, torch.cuda.device_count(), places.free_bytes(), memory_bytes, is_driver=True)


@contextmanager
def ray_cluster(
    config: Config,
    roles: Collection[str] = ROLES,
    interruption: Interruption | None = None,
    sizes: Sizes = layout.UNKNOWN,
) -> Iterator[Config]:
    """Connect to Ray while the block runs. A cluster started here ends with the block; a joined cluster stays.

    A process that is connected already keeps its connection. Yields the configuration as it is laid out on the cluster,
    with GPUs held for the actors of the roles. A signal ends the process at once, unless the interruption is deferred;
    the same command resumes.
    """
    interruption, stays = interruption or Interruption(), ray.is_initialized()
    with interruption.installed(), nullcontext() if stays else own_ray(config.ray.address is None):
        try:
            laid_out = _connect(config, roles, sizes)
            interruption.install()  # Ray's own handler raises at any point of the code
            places.reserve(laid_out)
            yield laid_out.config
        finally:
            places.forget(stays)
            wait_for_ray_threads()


def layout_on_cluster(config: Config, sizes: Sizes) -> Layout:
    """Return the layout of a run on the cluster at `ray.address`, joined to ask its nodes. Raises UserError."""
    with own_ray(starts=False):
        return _connect(config, ROLES, sizes)


def _watch_raylet(is_over: threading.Event) -> None:
    """End this process with a line and status 75 if Ray's raylet, which holds its shared memory, is killed.

    The system kills it first when memory is short. Ray itself would end this process at its next call, with status 1
    and twenty lines of its state.
    """
    raylet = [child for child in psutil.Process().children() if child.name() == "raylet"][-1]
    ended, descriptor = select.poll(), os.pidfd_open(raylet.pid)  # leaves its exit status to Ray
    ended.register(descriptor, select.POLLIN)

    def wait() -> None:
        ended.poll()
        os.close(descriptor)
        if not is_over.is_set():
            reason = "Ray's raylet was killed, as the system does when memory is short; the same command resumes"
            os.write(2, f"replug: {reason}\n".encode())
            nowhere = os.open(os.devnull, os.O_WRONLY)  # for Ray's own messages about it
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            kill(psutil.Process().children(recursive=True))
            os._exit(EXIT_STATUS)

    threading.Thread(target=wait, daemon=True, name="raylet-watch").start()


@contextmanager
def own_ray(starts: bool) -> Iterator[None]:
    """Make Ray require a token and, if the block `starts` it, listen on loopback only; end it with the block.

    Ray reads its environment on import, which a user's program may have done long ago. A RAY_AUTH_MODE that the user
    has set is kept.
    """
    environment = dict(os.environ)
    others = ray_children()  # of earlier clusters that this process may still use
    is_cluster, prints = ray_constants.ENABLE_RAY_CLUSTER, ray_worker.print_to_stdstream
    # Ray prints the death of a worker to stdout, beside --json; the pool logs it with its role and replaces the worker.
    ray_worker.print_to_stdstream = lambda *_, **__: None
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        if starts:
            os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token()))
    if starts:  # Ray's own name for "keep to 127.0.0.1"; ray.init replaces that address
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
        ray_constants.ENABLE_RAY_CLUSTER = False
    _read_authentication()
    try:
        yield
    finally:
        # Listed before the end: the children of a raylet that is gone are no longer this process's.
        started = [child for child in ray_children() if child not in others] if starts else []
        _is_over.set()
        ray.shutdown()
        kill(started)
        ray_constants.ENABLE_RAY_CLUSTER, ray_worker.print_to_stdstream = is_cluster, prints
        for name in [name for name in os.environ if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"]:
            if name in environment:
                os.environ[name] = environment[name]
            else:  # set by replug or Ray
                del os.environ[name]
        _read_authentication()


def _token() -> Path:
    path = private_folder() / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _read_authentication() -> None:
    """Make Ray read its authentication mode and token from the environment again."""
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _connect(config: Config, roles: Collection[str], sizes: Sizes) -> Layout:
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if config.ray.address not in (None, "auto", here):
            raise UserError(
                f"ray.address is {config.ray.address}, but this process is connected to the Ray at {here}; leave "
                "ray.address out to use that one, or call ray.shutdown() before"
            )
        return _lay_out_on_nodes(config, roles, sizes)
    if config.ray.address is None:
        return _start(config, roles, sizes)
    return _join(config, roles, sizes)


def _start(config: Config, roles: Collection[str], sizes: Sizes) -> Layout:
    """Start Ray on this machine, with a logical CPU for each actor and the GPUs that torch sees."""
    here = this_node()
    laid_out = layout.lay_out(config, [here], sizes, roles)
    # Ray puts the driver's folder first on its workers' import path: right for programs, not for our command.
    with contextlib.chdir(CODE) if os.environ.get("PYTHONSAFEPATH") else nullcontext():
        ray.init(
            address="local",  # None would join any cluster that runs on this machine
            num_cpus=max(1, len(laid_out.actors)),
            num_gpus=int(here.gpus),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=layout.OBJECT_STORE_BYTES,
            _temp_dir=str(private_folder() / "r"),  # Ray opens it to everybody; its parent stays private
            runtime_env=quoted_python(),
            # Workers do all the work: at Ray's niceness of 15, any other program on the machine would starve them.
            _system_config={"agent_register_timeout_ms": 1000 * SECONDS_FOR_AGENTS, "worker_niceness": 0},
        )
    global _is_over
    _is_over = threading.Event()
    _watch_raylet(_is_over)
    return laid_out


_is_over = threading.Event()  # the end of the cluster that this process has started last


def quoted_python() -> dict[str, str] | None:
    """Return runtime_env with a quoted Python, or None if no quotes are needed: Ray passes the path to a shell."""
    quoted = shlex.quote(sys.executable)
    return {"py_executable": quoted} if quoted != sys.executable else None


def _join(config: Config, roles: Collection[str], sizes: Sizes) -> Layout:
    address = str(config.ray.address)
    try:
        _require_answer(address)
        with contextlib.chdir(CODE):  # Ray puts the driver's folder first on its workers' import path
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=quoted_python())
    except (OSError, AuthenticationError) as error:
        raise UserError(
            f"ray.address: cannot join a cluster at {address}: {str(error).splitlines()[0]}; expected a cluster that "
            "`ray start --head` started, and its token: RAY_AUTH_TOKEN_PATH is "
            f"{os.environ.get('RAY_AUTH_TOKEN_PATH', 'not set')}"
        ) from error
    return _lay_out_on_nodes(config, roles, sizes)


def _lay_out_on_nodes(config: Config, roles: Collection[str], sizes: Sizes) -> Layout:
    """Lay a run out on the nodes of the connected cluster."""
    here = ray.get_runtime_context().get_node_id()
    nodes = list(layout.nodes_of(ray.nodes(), here))
    free = places.free_memory(nodes)
    nodes = [replace(node, gpu_bytes=free.get(node.name)) for node in nodes]
    laid_out = layout.lay_out(config, nodes, sizes, roles)
    _require_same_gpus(laid_out, roles, torch.cuda.device_count())
    return laid_out


def _require_same_gpus(laid_out: Layout, roles: Collection[str], visible: int) -> None:
    """Raise UserError if only one of Ray and torch has GPUs on this machine: this process is rank 0."""
    if "train" not in roles or laid_out.trains_on_gpu == (visible > 0):
        return
    if visible:
        raise UserError(
            f"ray.address: torch sees {visible} GPUs on this machine, but Ray was started here without any; expected "
            "`ray start` with --num-gpus, or CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    raise UserError(
        "ray.address: Ray counts GPUs on this machine, but torch sees none in this command; expected a torch for the "
        f"driver that is here, or CUDA_VISIBLE_DEVICES as Ray was started with; it is "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    )


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens at an address HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
