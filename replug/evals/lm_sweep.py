"""`replug evaluate` over several LMs (`lms`): each in a folder of its own, and a table and a figure of all.

All are asked the same texts with the same documents. `texts.path` is cut by the tokens of the first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import replace_file, write_json
from replug.data.folder_lock import sole_writer
from replug.evals.comparison import main_metric
from replug.evals.figures import draw_lms, to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import check_evaluation
from replug.evals.lm_table import lm_table
from replug.evals.sweep import evaluate_each, show_sweep, with_parts_of
from replug.models.build import lm_source


def evaluate_lms(config: EvaluationConfig) -> dict[str, dict]:
    """Run or resume an evaluation for every LM; returns LM -> what its `results.json` holds."""
    check_evaluation(config)
    folder = EvaluationFolder(Path(config.out).expanduser())
    with sole_writer(folder.path):
        for path in config.lms.values():  # the last one's is not to be found missing after hours
            lm_source(replace(config.lm, path=path), folder.budget_file, folder.scores)
        results = evaluate_each(config, configs_by_lm(config), folder)
        _write(folder, config, results)
    return results


def configs_by_lm(config: EvaluationConfig) -> Iterator[tuple[str, EvaluationConfig]]:
    """The evaluation of each LM by name, each to be run before the next is asked for: it takes what the first made."""
    out = Path(config.out).expanduser()
    first = EvaluationFolder(out / next(iter(config.lms)))
    texts = config.texts
    if texts.path and texts.tokenizer is None:
        texts = replace(texts, tokenizer=next(iter(config.lms.values())))
    for name, path in config.lms.items():
        paper = replace(config.paper, values=_of_lm(name, config.paper.values))
        lm = replace(config.lm, path=path)
        one = replace(config, lms={}, lm=lm, out=str(out / name), paper=paper, texts=texts)
        yield name, one if Path(one.out) == first.path else with_parts_of(first, one)


def _of_lm(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """The paper's figures by method, of those by LM and method."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}


def _write(folder: EvaluationFolder, config: EvaluationConfig, results: dict[str, dict]) -> None:
    """results.json last: it says that all are finished."""
    metric = main_metric(next(iter(results.values())))
    replace_file(folder.table, lm_table(results, config.evaluation, metric).encode())
    replace_file(folder.figure, to_svg(partial(draw_lms, results=results, metric=metric), width=8, height=4).encode())
    write_json(folder.results, results)
    show_sweep(folder)
