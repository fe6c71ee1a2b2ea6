"""`replug doctor`: check this machine, a configuration, or files that replug wrote."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from replug.commands.checks.machine import Check, Checks, State, machine_checks, run_checks
from replug.commands.command import Overrides
from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.config.paths import find_config
from replug.config.plain_text import plain_line

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
    from replug.commands.checks.stored import verify

    if overrides:
        raise UserError(f"{overrides[0]} is given, but {what} is not a configuration; remove it")
    verify(what, as_json)


def run_doctor(path: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Print a line for each check; returns the exit status: 0, or 1 where something is wrong."""
    checks = run_checks(_checks(path, overrides))
    if as_json:
        print(json.dumps([{**dataclasses.asdict(check), "state": check.state.value} for check in checks], indent=2))
    else:
        _print(checks)
    return int(any(check.state is State.wrong for check in checks))


def _checks(path: Path | None, overrides: Sequence[str]) -> Checks:
    """Return the checks of the machine, and of a configuration."""
    if path is None:
        return machine_checks()
    from replug.commands.checks.configuration import config_checks

    try:
        if names_evaluation(path):
            load_evaluation_config(path, overrides)
            said = f"{path}: keys, types and rules of the evaluation are valid"
            return [*machine_checks(), ("configuration", lambda: Check("configuration", State.ok, said))]
        config = load_config(path, overrides)
    except UserError as error:
        wrong = Check("configuration", State.wrong, str(error), "fix this first; its other checks did not run")
        return [*machine_checks(), ("configuration", lambda: wrong)]
    loaded = Check("configuration", State.ok, f"{path}: keys, types and rules are valid")
    return [*machine_checks(), ("configuration", lambda: loaded), *config_checks(config)]


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
