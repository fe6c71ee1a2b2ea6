"""What an evaluation leaves: results.json, examples.parquet, a table, a figure, and for tokens a coloured page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markdown import Markdown

from replug.configs.methods import Method
from replug.configs.schema import Evaluation, EvaluationConfig
from replug.data.files import replace_file, write_json, writing
from replug.evals.comparison import compare, main_metric, markdown_table
from replug.evals.evidence import EvidenceBook
from replug.evals.figures import draw_methods, draw_sweep, to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.loop import OutcomeFile, Task
from replug.evals.token_gain import (
    ScoredText,
    TokenGain,
    count_words,
    gains_by_rarity,
    rarity_bins,
    rarity_lines,
    token_gain_page,
    token_gains,
)
from replug.models.ensemble import document_weights

Row = Mapping[str, Any]


def write_results(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, book: EvidenceBook, outcomes: OutcomeFile
) -> None:
    """results.json last: it says that the evaluation is finished."""
    rows = outcomes.rows
    results = compare(task, rows, config.paper, config.num_resamples, config.seed)
    partial_file = folder.examples.with_suffix(".partial")
    with writing(partial_file):
        pq.write_table(pa.Table.from_pylist(list(example_rows(rows, book))), partial_file)
        partial_file.replace(folder.examples)
    table = markdown_table(results, config.evaluation.value, config.paper.table)
    if config.evaluation is Evaluation.tokens:
        by_text = _gains_by_text(rows, book)
        bins = rarity_bins(by_text, config.num_resamples, config.seed)
        results[book.methods[1].name] |= gains_by_rarity(bins)
        table += rarity_lines(bins)
        replace_file(folder.tokens, token_gain_page(by_text, bins).encode())
    replace_file(folder.table, table.encode())
    replace_file(folder.figure, _figure(results, book.methods).encode())
    write_json(folder.results, results)


def show_results(folder: EvaluationFolder) -> dict:
    """Print the table, and where things are."""
    Console(width=120).print(Markdown(folder.table.read_text()))
    for path in (folder.results, folder.examples, folder.figure, folder.tokens):
        if path.exists():
            print(f"{path.stem}: {path}")
    return json.loads(folder.results.read_text())


def example_rows(rows: Sequence[Row], book: EvidenceBook) -> Iterator[dict[str, Any]]:
    """One for each example and method: documents, weights, numbers and what the LM said."""
    for place, row in enumerate(rows):
        evidence = book.of(place)
        for method, outcome in row["methods"].items():
            yield {
                "id": row["id"],
                "group": row["group"],
                "method": method,
                "documents": book.ids(evidence[method].doc_rows),
                "weights": [float(weight) for weight in document_weights(evidence[method].similarities)],
                **outcome["numbers"],
                **outcome["detail"],
            }


def _figure(results: dict, methods: Sequence[Method]) -> str:
    metric, sweeps = main_metric(results), sweeps_of(methods)
    if sweeps:
        return to_svg(partial(draw_sweep, results=results, metric=metric, sweeps=sweeps), width=7, height=4)
    height = 1.2 + 0.45 * len(results)
    return to_svg(partial(draw_methods, results=results, metric=metric), width=8, height=height)


def sweeps_of(methods: Sequence[Method]) -> dict[str, dict[int, str]]:
    """Source -> number of documents -> method, of sources that are there with three numbers or more."""
    sweeps: dict[str, dict[int, str]] = {}
    for method in methods:
        if method.k and not method.is_concatenated:
            sweeps.setdefault(method.source, {})[method.k] = method.name
    return {source: of for source, of in sweeps.items() if len(of) >= 3}


def _gains_by_text(rows: Sequence[Row], book: EvidenceBook) -> list[list[TokenGain]]:
    """The first method's probabilities against the second's."""
    before, after = (method.name for method in book.methods)
    counts = count_words(book.all_texts())
    texts = (
        ScoredText(
            row["id"],
            tuple(row["methods"][before]["detail"]["token_texts"]),
            np.array(row["methods"][before]["detail"]["token_logprobs"]),
            np.array(row["methods"][after]["detail"]["token_logprobs"]),
        )
        for row in rows
    )
    return [token_gains(text, counts) for text in texts]
