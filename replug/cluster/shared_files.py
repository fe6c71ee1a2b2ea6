"""Whether every node of a joined cluster sees the files that actors read and write there, told before they start.

Without a shared file system an actor elsewhere fails where it first opens a file, hours into a run.
"""

import logging
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from replug.config.errors import UserError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0  # for a node to start a process that looks


def require_seen_by_all(written: Path, read: Collection[Path]) -> None:
    """Raise UserError naming each other node with room for actors, and what it does not see.

    That is a file put into the folder `written` now, or one of the files and folders `read`. A node that does not
    answer is warned of.
    """
    nodes = _other_nodes()
    if not nodes:
        return
    with _new_file(written) as new:
        names = [str(path.absolute()) for path in (new, *read)]
        asked = {_ask(node, names): node["NodeManagerAddress"] for node in nodes}
        done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        problems = [f"node {asked[answer]} does not see {path}" for answer in done for path in _missing(answer, asked)]
    for answer in silent:
        log.warning(f"node {asked[answer]} does not say within {ANSWER_SECONDS:g} s whether it sees {written}")
    if problems:
        raise UserError(
            f"ray.address: {'; '.join(problems)}; put run_dir, data and models where all nodes see them by the same "
            "path, or take the node out of the cluster"
        )


def _other_nodes() -> list[dict[str, Any]]:
    """Those that actors may be placed on."""
    here = ray.get_runtime_context().get_node_id()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here and node["Resources"].get("CPU")]


@contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """One that no node can have looked for yet: file systems remember for a while what was not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seen-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()


def _ask(node: dict[str, Any], names: list[str]) -> Any:
    def missing(names: list[str]) -> list[str]:  # travels by value: a node may not have this module either
        return [name for name in names if not os.path.exists(name)]  # noqa: PTH110

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0)(missing).options(scheduling_strategy=there).remote(names)


def _missing(answer: Any, asked: dict[Any, str]) -> list[str]:
    try:
        return list(ray.get(answer))
    except RayError as error:  # a node that has just left
        log.warning(f"node {asked[answer]} does not say what files it sees: {str(error).splitlines()[0]}")
        return []
