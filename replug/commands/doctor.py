"""`replug doctor`: check this machine, a configuration, or files that replug wrote.

A check returns a `Check`, or None if it has nothing to say. Checks start no Ray, load no model and download nothing,
and each ends within `LIMIT_SECONDS`, even if a file system hangs.
"""

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import psutil
import typer

from replug.commands.command import Overrides
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import find_config
from replug.config.plain_text import plain_line
from replug.slurm.ray_node import OBJECT_STORE_BYTES

LIMIT_SECONDS = 30.0
GIB = 2**30


class State(Enum):
    ok = "ok"
    warning = "warning"
    wrong = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its state, a line that says it, and how to fix it."""

    name: str
    state: State
    found: str
    fix: str = ""


Checks = Sequence[tuple[str, Callable[[], Check | None]]]


COLOURS = {State.ok: "green", State.warning: "yellow", State.wrong: "red"}
MARKS, PLAIN_MARKS = "✓!✗", "v!x"  # of the states, the latter for a terminal that does not know the former


def doctor(
    what: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file, folder that replug wrote, or cache of LM scores. Default: check this machine.",
            metavar="[CONFIG|FOLDER|CACHE]",
            parser=find_config,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that this machine can run a configuration, or verify the checksums of a folder.

    FOLDER is a run directory, prepared set, labels, index or encoder. For a cache (RUN_DIR/scores.sqlite) the command
    also lists its scores by LM. The exit status is 1 if a check fails.

    replug doctor configs/quickstart.yaml
    """
    if what is None or what.suffix in (".yaml", ".yml"):
        raise typer.Exit(run_doctor(what, overrides or [], as_json))
    from replug.commands.doctor_folder import verify

    if overrides:
        raise UserError(f"{overrides[0]} is given, but {what} is not a configuration; remove it")
    verify(what, as_json)


def run_doctor(path: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Print a line for each check; returns the exit status: 0, or 1 where something is wrong."""
    checks = run_checks(_checks(path, overrides))
    if as_json:
        print(json.dumps([{**asdict(check), "state": check.state.value} for check in checks], indent=2))
    else:
        _print(checks)
    return int(any(check.state is State.wrong for check in checks))


def _checks(path: Path | None, overrides: Sequence[str]) -> Checks:
    """Return the checks of the machine, and of a configuration."""
    if path is None:
        return MACHINE_CHECKS
    from replug.commands.doctor_configuration import config_checks

    of_config: Checks = ()
    try:
        if names_evaluation(path):
            load_evaluation_config(path, overrides)
        else:
            of_config = config_checks(load_config(path, overrides))
        loaded = Check("configuration", State.ok, f"{path}: keys, types and rules are valid")
    except UserError as error:
        loaded = Check("configuration", State.wrong, str(error), "fix this first; its other checks did not run")
    return [*MACHINE_CHECKS, ("configuration", lambda: loaded), *of_config]


def _print(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    is_known = MARKS.encode(console.encoding, errors="ignore").decode(console.encoding) == MARKS
    of_state = dict(zip(COLOURS, MARKS if is_known else PLAIN_MARKS, strict=True))
    for check in checks:
        mark, colour = of_state[check.state], COLOURS[check.state]
        fix = f" → {plain_line(check.fix)}" if check.fix and check.state is not State.ok else ""
        line = f" {check.name:<16} {plain_line(check.found)}"
        console.print(Text.assemble((mark, colour), line, (fix, colour)), soft_wrap=True)
    counts = {state: sum(check.state is state for check in checks) for state in State}
    console.print(f"{counts[State.ok]} passed, {counts[State.warning]} warnings, {counts[State.wrong]} failed")


# This machine --------------------------------------------------------------------------------------------------------


def run_checks(checks: Checks, limit_seconds: float = LIMIT_SECONDS) -> list[Check]:
    """Run every check within its time limit and return the findings in order."""
    results = [_limited(name, check, limit_seconds) for name, check in checks]
    return [check for check in results if check is not None]


def _limited(name: str, check: Callable[[], Check | None], limit_seconds: float) -> Check | None:
    results: list[Check | None] = []

    def caught() -> None:
        try:
            results.append(check())
        except (OSError, ValueError, ImportError) as error:
            line = f"cannot be looked at: {type(error).__name__}: {error}"
            results.append(Check(name, State.wrong, line, "fix what it names"))

    # A daemon: a thread that hangs in a dead file system must not keep the command from ending.
    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    late = Check(name, State.warning, f"no answer within {limit_seconds:g} s", "is a file system or the network stuck?")
    return results[0] if results else late


def cuda() -> Check:
    """Check that torch can use the machine's GPUs."""
    import torch

    from replug.models.hardware import unusable_gpus

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Check("CUDA", State.ok, f"{torch.version.cuda}, {len(names)} GPUs: {', '.join(sorted(set(names)))}")
    if problem := unusable_gpus():
        return Check("CUDA", State.wrong, problem, "or hide the GPUs, to run on the CPU: CUDA_VISIBLE_DEVICES=")
    return Check("CUDA", State.ok, "no GPU for this process: everything runs on the CPU")


def ray_token() -> Check:
    """Check how Ray authenticates; the token itself is never read."""
    if (mode := os.environ.get("RAY_AUTH_MODE", "token")) != "token":
        line = f"RAY_AUTH_MODE={mode}: whoever reaches Ray's ports runs code"
        return Check("Ray token", State.warning, line, "unset RAY_AUTH_MODE")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path is None:
        return Check("Ray token", State.ok, "every run has a token of its own")
    if not Path(path).is_file():
        return Check("Ray token", State.wrong, f"RAY_AUTH_TOKEN_PATH: {path} does not exist", "name the token's file")
    if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
        return Check("Ray token", State.wrong, f"{path} can be read by others", f"chmod 600 {path}")
    return Check("Ray token", State.ok, f"in {path}, which this user alone reads")


def running_ray() -> Check:
    """Look for clusters of this user on this machine: one that was left behind holds memory."""
    heads = [
        str(process.pid)
        for process in psutil.process_iter(["name", "uids", "status"])
        if process.info["name"] == "gcs_server"
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and process.info["uids"].real == os.getuid()
    ]
    if not heads:
        return Check("Ray here", State.ok, "no cluster of this user runs on this machine")
    found = f"clusters of this user run here: {len(heads)} (gcs_server {', '.join(heads)})"
    return Check("Ray here", State.warning, found, "if no run of yours needs them: ray stop, which ends all of them")


def shared_memory() -> Check:
    """Check the room in /dev/shm, where Ray keeps its object store."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    found = f"{free / GIB:.2f} GiB free in /dev/shm, Ray takes {OBJECT_STORE_BYTES / GIB:.2f}"
    return Check(
        "shared memory", State.wrong if free < OBJECT_STORE_BYTES else State.ok, found, "a container takes --shm-size"
    )


MACHINE_CHECKS: Checks = (
    ("CUDA", cuda),
    ("Ray token", ray_token),
    ("Ray here", running_ray),
    ("shared memory", shared_memory),
)
