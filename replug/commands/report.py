"""`replug report`: a finished run's page and table again, or one table of several finished runs or evaluations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import UserError
from replug.config.load import names_evaluation
from replug.config.paths import require_picture

if TYPE_CHECKING:
    from replug.train.run_dir import RunDirectory


def report(
    folders: Annotated[list[Path], typer.Argument(help="Finished runs, or finished evaluations.", metavar="DIR...")],
    figure: Annotated[Path | None, typer.Option(help="Also write the overview of one run as a PNG.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table of several folders as Markdown.")] = None,
) -> None:
    """Print the table of a finished run again and write its report.html; join the tables of several folders.

    Evaluations are joined where they measured the same texts with the same documents, such as those of several LMs.

    replug report runs/families/gpt2 runs/families/opt-125m
    """
    if figure is not None and len(folders) > 1:
        raise UserError(f"--figure draws one run, and {len(folders)} folders are given; expected one")
    if out is not None and len(folders) == 1:
        raise UserError("--out writes the table of several folders, and one is given; expected two or more")
    of_evaluations = [names_evaluation(folder / "config.yaml") for folder in folders]
    if all(of_evaluations):
        _report_evaluations(folders, figure, out)
    elif any(of_evaluations):
        run, evaluation = (folders[of_evaluations.index(which)] for which in (False, True))
        raise UserError(f"{evaluation} is an evaluation and {run} is not; expected folders of one kind")
    else:
        _report_runs(folders, figure, out)


def _report_evaluations(folders: list[Path], figure: Path | None, out: Path | None) -> None:
    from replug.evals.folder import EvaluationFolder
    from replug.evals.results_files import join_evaluations, show_results

    if figure is not None:
        raise UserError(f"--figure draws a run, and {folders[0]} is an evaluation, which has figure.svg")
    if len(folders) > 1:
        _show(join_evaluations(folders), out)
        return
    folder = EvaluationFolder(folders[0])
    folder.require_finished()
    show_results(folder)


def _report_runs(folders: list[Path], figure: Path | None, out: Path | None) -> None:
    from replug.data.folder import sole_writer
    from replug.train.figures import overview_png
    from replug.train.run import show_results
    from replug.train.run_dir import RunDirectory

    runs = [RunDirectory(folder) for folder in folders]
    for run in runs:
        if not run.is_finished:
            raise UserError(f"{run.path} holds no finished run (manifest.json is missing)")
    if len(runs) > 1:
        _show(_join_runs(runs), out)
        return
    if figure is not None:
        require_picture("--figure", figure)
    [run] = runs
    with sole_writer(run.path):
        results = show_results(run)
    if figure is not None and "bpb" not in results:
        raise UserError("--figure: the run measured no held-out texts (evaluate.heldout=false), so it has no picture")
    if figure is not None:
        overview_png(figure, results, run.read_metrics())
        print(f"figure: {figure}")


def _join_runs(runs: list["RunDirectory"]) -> str:
    """Return bits per byte by run as Markdown. Raises UserError for runs on another prepared set or other labels."""
    from replug.data.files import read_json
    from replug.evals.comparison import markdown_line, row_names
    from replug.train.results import METHODS
    from replug.train.run_dir import LABELS, MEND, SET

    for run in runs:
        run.folder.require()
        first, inputs = runs[0].folder.inputs or {}, run.folder.inputs or {}
        for name, what in ((SET, "prepared set"), (LABELS, "labels")):
            if first.get(name) != inputs.get(name):
                raise UserError(f"{run.path} has another {what} than {runs[0].path}; expected the same in all")
    names = row_names([run.path for run in runs])
    results = {name: read_json(run.results, MEND) for name, run in zip(names, runs, strict=True)}
    of_dev = {name: (one.get("weights") or {}).get("best") for name, one in results.items()}
    heldout = {name: one.get("bpb", {}).get("all", {}) for name, one in results.items()}
    methods = [method for method in METHODS if any(method in of for of in heldout.values())]
    head = ["run", *(METHODS[method] for method in methods), *(["development texts"] if any(of_dev.values()) else [])]
    rows = []
    for name, best in of_dev.items():
        cells = [f"{heldout[name][method]:.4f}" if method in heldout[name] else "" for method in methods]
        rows.append([name, *cells, *([f"{best['bpb']:.4f}" if best else ""] if any(of_dev.values()) else [])])
    table = "".join(f"{markdown_line(cells)}\n" for cells in (head, ["---"] * len(head), *rows))
    return f"bits per byte (lower is better)\n\n{table}"


def _show(table: str, out: Path | None) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from replug.data.files import replace_file

    Console(width=140).print(Markdown(table))
    if out is not None:
        replace_file(out, table.encode())
        print(f"table: {out}")


COMMAND = Command(report, Group.evaluate, place=2)
