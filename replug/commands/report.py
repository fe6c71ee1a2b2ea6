"""`replug report`: show finished runs and evaluations, or join several in one table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.config.errors import UserError
from replug.config.load import names_evaluation

if TYPE_CHECKING:
    from replug.evals.folder import EvaluationFolder
    from replug.evals.tables import Blocks
    from replug.train.run_dir import RunDirectory

AGAIN = "run the evaluation again"
HELDOUT = "language_modelling"  # a run's evaluation of held-out texts in results.json


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or of finished evaluations.", metavar="DIR...")
    ],
    policies: Annotated[
        Path | None, typer.Option(help="Fit policies of when to retrieve to PopQA evaluations; report in this folder.")
    ] = None,
) -> None:
    """Show the results of finished runs or evaluations, and join the tables of several folders.

    Joined folders must have the same texts and corpus, such as evaluations of several LMs. One run: report.html is
    written again. --policies takes a folder for each LM.

    replug report runs/families/gpt2 runs/families/opt-125m

    replug report runs/popqa --policies runs/adaptive
    """
    of_evaluations = [names_evaluation(folder / "config.yaml") for folder in folders]
    if all(of_evaluations) and policies is not None:
        _report_policies(folders, policies)
    elif policies is not None:
        raise UserError(f"--policies is fitted to evaluations of popqa, and {folders[0]} is not an evaluation")
    elif all(of_evaluations):
        _report_evaluations(folders)
    elif any(of_evaluations):
        run, evaluation = (folders[of_evaluations.index(which)] for which in (False, True))
        raise UserError(f"{evaluation} is an evaluation and {run} is not; expected folders of one kind")
    else:
        _report_runs(folders)


def _report_evaluations(folders: list[Path]) -> None:
    from replug.data.files import read_json
    from replug.evals.folder import EvaluationFolder
    from replug.evals.tables import joined_blocks, print_blocks, row_names

    evaluations = [EvaluationFolder(folder) for folder in folders]
    if len(evaluations) == 1:
        evaluations[0].show()
        return
    name = _require_comparable(evaluations)
    results = [read_json(folder.results, AGAIN)[name] for folder in evaluations]
    print_blocks(joined_blocks(name, dict(zip(row_names(folders), results, strict=True))), width=140)


def _require_comparable(folders: list["EvaluationFolder"]) -> str:
    """Return the common evaluation of finished folders. Raises UserError if evaluation, texts or documents differ."""
    from replug.config.load import load_stored_evaluation_config
    from replug.evals.folder import CORPUS, TEXTS

    for folder in folders:
        folder.require_finished()
    names = [load_stored_evaluation_config(folder.config).evaluation for folder in folders]
    inputs = [folder.folder.inputs or {} for folder in folders]
    for folder, name, own in zip(folders, names, inputs, strict=True):
        if name != names[0]:
            raise UserError(f"{folder.path} is of evaluation={name}, but {folders[0].path} of {names[0]}")
        for key, what in ((TEXTS, "texts"), (CORPUS, "corpus")):
            # An evaluation without retrieval has read no corpus.
            known = [one[key] for one in (inputs[0], own) if one[key] is not None]
            if len(set(known)) > 1:
                raise UserError(f"{folder.path} has other {what} than {folders[0].path}; expected the same in all")
    return names[0]


def _report_policies(folders: list[Path], out: Path) -> None:
    from replug.data.folder import sole_writer
    from replug.evals.adaptive import read_answered, write_report
    from replug.evals.folder import EvaluationFolder
    from replug.evals.tables import markdown_text, print_blocks

    evaluations = [EvaluationFolder(folder) for folder in folders]
    if (name := _require_comparable(evaluations)) != "popqa":
        raise UserError(f"{folders[0]} is of evaluation={name}; --policies are fitted to evaluations of popqa")
    answered = read_answered(evaluations)
    with sole_writer(out):
        sections = write_report(answered, out)
    for title, blocks in sections.items():
        print_blocks([*filter(None, [markdown_text(title)]), *blocks], width=150)
    print(f"report: {out / 'report.html'}")


def _report_runs(folders: list[Path]) -> None:
    from replug.data.folder import sole_writer
    from replug.evals.tables import print_blocks
    from replug.train.report import print_summary, write_report
    from replug.train.run_dir import RunDirectory

    runs = [RunDirectory(folder) for folder in folders]
    for run in runs:
        if not run.is_finished:
            raise UserError(f"{run.path} holds no finished run (manifest.json is missing)")
    if len(runs) > 1:
        print_blocks(_joined_runs(runs), width=140)
        return
    [run] = runs
    with sole_writer(run.path):
        print_summary(run, write_report(run))


def _joined_runs(runs: list["RunDirectory"]) -> "Blocks":
    """Return bits per byte by run. Raises UserError for runs on another prepared set or other labels."""
    from replug.data.files import read_json
    from replug.evals.tables import Table, joined_blocks, row_names
    from replug.train.run_dir import LABELS, MEND, SET

    for run in runs:
        run.folder.require()
        first, inputs = runs[0].folder.inputs or {}, run.folder.inputs or {}
        for name, what in ((SET, "prepared set"), (LABELS, "labels")):
            if first.get(name) != inputs.get(name):
                raise UserError(f"{run.path} has another {what} than {runs[0].path}; expected the same in all")
    names = row_names([run.path for run in runs])
    results = {name: read_json(run.results, MEND) for name, run in zip(names, runs, strict=True)}
    heldout = {name: of[HELDOUT] for name, of in results.items() if HELDOUT in of}
    best = {name: (of.get("weights") or {}).get("best") for name, of in results.items()}
    of_dev = [[name, f"{look['bpb']:.4f}"] for name, look in best.items() if look]
    blocks = joined_blocks(HELDOUT, heldout) if heldout else []
    return [*blocks, *([Table(["run", "bpb of development texts"], of_dev)] if of_dev else [])]
