"""What an evaluation leaves: results.json, leakage.json, examples.parquet, a table, a figure, and what a kind adds.

Several finished evaluations of the same texts are joined as one table: each LM, or each draw of demonstrations, is an
evaluation in a folder of its own.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_stored_evaluation_config
from replug.config.methods import Method
from replug.data.files import read_json, replace_file
from replug.data.folder import require_checksums, write_last
from replug.evals.comparison import (
    Measurements,
    Results,
    add_paper_figures,
    compare,
    correct_for_many,
    difference_text,
    foot_lines,
    main_metric,
    markdown_line,
    markdown_table,
    row_names,
    size_text,
)
from replug.evals.evidence import EvidenceBook
from replug.evals.figures import draw_methods, draw_sweep, to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import EvaluationKind, Finished
from replug.evals.leakage import Overlaps, overlap_lines, write_leakage
from replug.evals.lm_passes import SECONDS
from replug.evals.loop import Measured
from replug.evals.outcomes import Row, write_examples

AGAIN = "run the evaluation again"


def write_results(
    config: EvaluationConfig,
    folder: EvaluationFolder,
    kind: EvaluationKind,
    task: Measured,
    book: EvidenceBook,
    rows: Sequence[Row],
    latencies: Sequence[Row] = (),
    overlaps: Overlaps | None = None,
) -> None:
    """results.json last: it says that the evaluation is finished. `latencies` are of some of the rows' examples.

    `overlaps` are of all that was asked, where there is a corpus.
    """
    ids = [row["id"] for row in rows]
    in_corpus = overlaps.of(ids) if overlaps else None
    results = compare(task, rows, config.paper, config.num_resamples, config.seed, in_corpus)
    if latencies:
        timed = Measurements(latencies, config.num_resamples, config.seed)
        for method, of in results.items():
            of["seconds"] = timed.metric(method, SECONDS, timed.all)
    temperatures = {method.name: book.temperature(method) for method in book.methods if method.is_weighted}
    if any(value != 1 for value in temperatures.values()):  # another than the paper's
        for method, value in temperatures.items():
            results[method]["temperature"] = {"value": value, "n": len(rows), "interval": [value, value]}
    write_examples(folder.examples, rows, book, task)
    table = markdown_table(results, config.evaluation, config.paper.table)
    table += add_paper_figures(results, config.paper)
    if overlaps:
        write_leakage(folder.leakage, overlaps, ids)
        table += overlap_lines(overlaps, ids)
    table += kind.add_findings(Finished(config, folder, rows, book, results))
    replace_file(folder.table, table.encode())
    metric, sweeps = main_metric(results), sweeps_of(book.methods)
    if sweeps:
        figure = to_svg(partial(draw_sweep, results=results, metric=metric, sweeps=sweeps), width=7, height=4)
    else:
        height = 1.2 + 0.45 * len(results)
        figure = to_svg(partial(draw_methods, results=results, metric=metric), width=8, height=height)
    replace_file(folder.figure, figure.encode())
    shown = (
        folder.config,
        folder.lm,
        folder.table,
        folder.examples,
        folder.outcomes,
        folder.latency,
        folder.leakage,
        folder.temperatures,
    )
    write_last(folder.results, results, shown)


def show_results(folder: EvaluationFolder) -> dict:
    """Print the table, and where things are. Raises UserError where it is not what was written."""
    require_checksums(folder.path, "bring it back, or give another out")
    Console(width=120).print(Markdown(folder.table.read_text()))
    for path in (
        folder.results,
        folder.examples,
        folder.figure,
        folder.flop_figure,
        folder.weights,
        folder.tokens,
        folder.latency,
        folder.leakage,
    ):
        if path.exists():
            print(f"{path.stem}: {path}")
    return json.loads(folder.results.read_text())


def sweeps_of(methods: Sequence[Method], least: int = 3) -> dict[str, dict[int, str]]:
    """Source -> number of documents -> method, of sources that are there with so many numbers or more."""
    sweeps: dict[str, dict[int, str]] = {}
    for method in methods:
        if method.k and method.is_plain:
            sweeps.setdefault(method.source, {})[method.k] = method.name
    return {source: of for source, of in sweeps.items() if len(of) >= least}


def join_evaluations(paths: Sequence[Path]) -> str:
    """Return the table of finished evaluations as Markdown.

    Raises UserError for a folder that is not finished, and for one of another evaluation, other texts or documents.
    """
    folders = [EvaluationFolder(path) for path in paths]
    for folder in folders:
        folder.require_finished()
        require_checksums(folder.path, AGAIN)
    names = [load_stored_evaluation_config(folder.config).evaluation for folder in folders]
    inputs = [read_json(folder.inputs, AGAIN) for folder in folders]
    for folder, name, own in zip(folders, names, inputs, strict=True):
        if name != names[0]:
            raise UserError(f"{folder.path} is of evaluation={name}, but {folders[0].path} of {names[0]}")
        for key in ("texts", "corpus"):
            # An evaluation without retrieval has read no corpus.
            known = [one[key] for one in (inputs[0], own) if one[key] is not None]
            if len(set(known)) > 1:
                raise UserError(f"{folder.path} has other {key} than {folders[0].path}; expected the same in all")
    return joined_table(
        names[0], dict(zip(row_names(paths), (read_json(f.results, AGAIN) for f in folders), strict=True))
    )


def joined_table(title: str, results: Mapping[str, Results]) -> str:
    """Return the main metric over all examples by folder and method, and the differences within each folder.

    Verdicts are corrected for the comparisons that this table shows.
    """
    first = next(iter(results.values()))
    metric = main_metric(first)
    methods = list(dict.fromkeys(method for of in results.values() for method in of))
    head = ["", *methods]
    rows = [
        [name, *(f"{of[method][metric]['value']:.4f}" if method in of else "" for method in methods)]
        for name, of in results.items()
    ]
    differences = {}
    for name, of in results.items():
        base, *others = of
        for method in others:
            differences[f"{name}: {metric} of {method} − {base}"] = dict(of[method][f"{metric} - {base}"])
    correct_for_many(list(differences.values()))
    size = next(iter(first.values()))[metric]
    lines = [f"{title}: {metric}, {size_text(size)}", "", *map(markdown_line, (head, ["---"] * len(head), *rows)), ""]
    shown = [f"- {name}: {difference_text(entry)}" for name, entry in differences.items()]
    return "\n".join([*lines, *shown, "", *foot_lines(len(differences), size)]) + "\n"
