"""`replug report`: a finished run's page and table again."""

from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import UserError
from replug.config.paths import require_picture


def report(
    run_dir: Annotated[Path, typer.Argument(help="A finished run directory.")],
    figure: Annotated[Path | None, typer.Option(help="Also write the overview as a PNG.")] = None,
) -> None:
    """Write RUN_DIR/report.html again and print the table."""
    from replug.data.folder_lock import sole_writer
    from replug.train.figures import overview_png
    from replug.train.run import show_results
    from replug.train.run_dir import RunDirectory

    run = RunDirectory(run_dir)
    if not run.is_finished:
        raise UserError(f"{run_dir} holds no finished run (results.json is missing)")
    if figure is not None:
        require_picture("--figure", figure)
    with sole_writer(run.path):
        results = show_results(run)
    if figure is not None and "bpb" not in results:
        raise UserError("--figure: the run measured no held-out texts (evaluate.heldout=false), so it has no picture")
    if figure is not None:
        overview_png(figure, results, run.read_metrics())
        print(f"figure: {figure}")


COMMAND = Command(report, Group.evaluate, place=2)
