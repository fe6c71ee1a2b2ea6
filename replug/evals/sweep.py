"""Several evaluations of the same texts by one command: each in a folder of its own inside `out`, and a table of all.

Those after the first take its documents, its prepared set, its indexes, its counts of subjects and what it found on the
web. All spend one budget of requests.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import REPLUG
from replug.config.rules import evaluation_methods
from replug.data.files import replace_file
from replug.data.manifest import require_checksums, write_checksums
from replug.evals.folder import EvaluationFolder
from replug.evals.run import evaluate

log = logging.getLogger(__name__)


def evaluate_each(
    config: EvaluationConfig, named: Iterable[tuple[str, EvaluationConfig]], folder: EvaluationFolder
) -> dict[str, dict]:
    """Run or resume each, before the next is asked for; returns name -> what its `results.json` holds.

    Raises UserError where the folder was begun with another configuration than `config`, that of all.
    """
    folder.claim(config, None)
    results = {}
    for name, one in named:
        log.info(f"{name}: {one.out}")
        results[name] = evaluate(one, folder)
    return results


def show_sweep(folder: EvaluationFolder) -> None:
    """Print the table of all, and where things are."""
    Console(width=120).print(Markdown(folder.table.read_text()))
    for path in (folder.results, folder.figure):
        if path.is_file():
            print(f"{path.stem}: {path}")


def with_parts_of(first: EvaluationFolder, one: EvaluationConfig) -> EvaluationConfig:
    """What a later evaluation is to be run with, so that it takes what the first has made; some of it is put there."""
    own = EvaluationFolder(Path(one.out))
    own.found.mkdir(parents=True, exist_ok=True)
    _link_documents(first, own)
    if first.frequencies.is_file():  # counting reads the whole corpus
        counted = own.frequencies
        require_checksums(first.found, "remove it, and the subjects are counted again", [counted.name])
        replace_file(counted, first.frequencies.read_bytes())
        write_checksums(own.found, {counted.name: counted})
    if first.overlaps.is_file():  # which is compared with what it is of
        replace_file(own.overlaps, first.overlaps.read_bytes())
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


def _link_documents(first: EvaluationFolder, own: EvaluationFolder) -> None:
    """Documents that were read from a file once are not written again; of another file they are refused."""
    read, linked = first.data / "corpus", own.data / "corpus"
    if linked.is_symlink() and not linked.exists():  # the first ones were removed since
        linked.unlink()
    if read.is_dir() and not linked.exists():
        own.data.mkdir(exist_ok=True)
        linked.symlink_to(os.path.relpath(read, own.data))
