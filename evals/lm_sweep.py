"""`replug evaluate` over several LMs (`lms`): each in a folder of its own, and a table and a figure of all.

All are asked the same texts with the same documents: those after the first take its prepared set, its indexes, its
counts of subjects and what it found on the web. `texts.path` is cut by the tokens of the first.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from replug.configs.evaluation_schema import EvaluationConfig
from replug.configs.methods import REPLUG
from replug.configs.rules import evaluation_methods
from replug.data.checksums import require_checksums, write_checksums
from replug.data.files import replace_file, write_json
from replug.data.folder_lock import sole_writer
from replug.evals.comparison import main_metric
from replug.evals.figures import draw_lms, to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import check_evaluation
from replug.evals.lm_table import lm_table
from replug.evals.run import evaluate
from replug.models.build import lm_source

log = logging.getLogger(__name__)


def evaluate_lms(config: EvaluationConfig) -> dict:
    """Run or resume an evaluation for every LM; returns LM -> what its `results.json` holds."""
    check_evaluation(config)
    folder = EvaluationFolder(Path(config.out).expanduser())
    with sole_writer(folder.path):
        return _evaluate_lms(config, folder)


def _evaluate_lms(config: EvaluationConfig, folder: EvaluationFolder) -> dict:
    for path in config.lms.values():  # the last one's is not to be found missing after hours
        lm_source(replace(config.lm, path=path), folder.budget_file, folder.scores)
    folder.claim(config, None)
    results = {}
    for name, one in configs_by_lm(config):
        log.info(f"LM {name}: {one.lm.path}")
        results[name] = evaluate(one)
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
        yield name, one if Path(one.out) == first.path else _with_parts_of(first, one)


def _of_lm(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """The paper's figures by method, of those by LM and method."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}


def _with_parts_of(first: EvaluationFolder, one: EvaluationConfig) -> EvaluationConfig:
    own_found = EvaluationFolder(Path(one.out)).found
    own_found.mkdir(parents=True, exist_ok=True)
    if first.frequencies.is_file():  # counting reads the whole corpus
        own = own_found / first.frequencies.name
        require_checksums(first.found, "remove it, and the subjects are counted again", [own.name])
        replace_file(own, first.frequencies.read_bytes())
        write_checksums(own.parent, {own.name: own})
    if first.overlaps.is_file():  # which is compared with what it is of
        replace_file(own_found / first.overlaps.name, first.overlaps.read_bytes())
    if not one.web.snapshot:
        one = replace(one, web=replace(one.web, snapshot=str(first.snapshot)))
    indexes = first.found / "index"
    used = {method.source for method in evaluation_methods(one)}
    if one.data.source:
        one = replace(one, data=replace(one.data, source=None, prepared=str(first.data)))
    if REPLUG in used and not one.index.out:
        one = replace(one, index=replace(one.index, out=str(indexes / REPLUG)))
    built = {name: str(indexes / name) for name in one.retrievers if (indexes / name).is_dir()}
    return replace(one, retrievers={**one.retrievers, **built})


def _write(folder: EvaluationFolder, config: EvaluationConfig, results: dict) -> None:
    """results.json last: it says that all are finished."""
    metric = main_metric(next(iter(results.values())))
    replace_file(folder.table, lm_table(results, config.evaluation, metric).encode())
    replace_file(folder.figure, to_svg(partial(draw_lms, results=results, metric=metric), width=8, height=4).encode())
    write_json(folder.results, results)
    Console(width=120).print(Markdown(folder.table.read_text()))
    for path in (folder.results, folder.figure):
        print(f"{path.stem}: {path}")
