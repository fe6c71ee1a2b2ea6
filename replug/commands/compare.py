"""`replug compare`: judge a tuned model by your own questions."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from replug.commands.command import Overrides
from replug.config.errors import UserError
from replug.config.paths import find_config, require_folder

SHOWN = ("Success@1", "Success@5", "Success@20", "MRR@20", "nDCG@10")  # nDCG needs gold documents


def compare(
    base: Annotated[str, typer.Argument(help="Model to compare with: a folder, a hub name or package:minilm.")],
    tuned: Annotated[str, typer.Argument(help="Model to judge, such as a fine-tuned one, or a run.")],
    overrides: Overrides = None,
    *,
    questions: Annotated[
        str, typer.Option("--on", metavar="ROWS", help="Questions with answers, or with gold (ids of documents).")
    ],
    documents: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Rows, or a folder of texts. Default: ROWS, if it is a BEIR folder."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict and all measures as JSON.")
    ] = None,
) -> None:
    """Compare two sentence-transformers models by questions on your documents, with intervals and a verdict.

    A document is right if it is gold or, without gold, holds an answer. HELPED and HARMED mean that the 95% interval of
    the paired difference in mean reciprocal rank (MRR@20) lies above or below 0. It runs `replug evaluate
    eval_retrieval` and takes its keys; out=DIR keeps its files.

    replug compare sentence-transformers/all-MiniLM-L6-v2 models/tuned --on questions.jsonl --documents docs/
    """
    from replug.data.files import write_json
    from replug.evals.kinds import checked_evaluation
    from replug.evals.run import measure
    from replug.evals.tables import Table, difference_text, interval_text, print_blocks, reading_line
    from replug.messages import quiet_transformers
    from replug.models.packaged import resolve_encoder_path
    from replug.train.evaluation import QUESTION, QUESTIONS
    from replug.train.report import MRR, verdict_of

    if json_file is not None:
        require_folder("--json", json_file.absolute().parent)
    before, after = QUESTION
    with tempfile.TemporaryDirectory(prefix="replug-compare-") as temporary, quiet_transformers():
        keys = {
            "out": temporary,
            "methods": f"[{before},{after}]",
            "retriever.path": resolve_encoder_path(base),
            f"retrievers.{after}": resolve_encoder_path(tuned),
            "questions.path": questions,
            **_documents(questions, documents),
        }
        given = [*(f"{key}={value}" for key, value in keys.items()), *(overrides or [])]
        results = measure(checked_evaluation(find_config("eval_retrieval"), given)).read_results()["retrieval"]
    judged = verdict_of({QUESTIONS: results})
    assert judged is not None
    verdict, entry = judged["verdict"], results[after][f"{MRR} - {before}"]
    rows = [
        [
            name,
            *(f"{of[name]['value']:.4f} ({interval_text(of[name])})" for of in (results[before], results[after])),
            difference_text(results[after][f"{name} - {before}"]),
        ]
        for name in SHOWN
        if name in results[after]
    ]
    columns = ["", "base (95% interval)", "tuned (95% interval)", "difference (95% interval)"]
    print_blocks([Table(columns, rows), reading_line(0, entry)])
    if json_file is not None:
        content = {"verdict": verdict, "measure": MRR, **entry, "base": base, "tuned": tuned, "results": results}
        write_json(json_file, content)
    low, high = entry["interval"]
    print(f"VERDICT: {verdict}, {MRR} {entry['value']:+.4f} (95% interval {low:+.4f} to {high:+.4f})")


def _documents(questions: str, documents: str | None) -> dict[str, Any]:
    """Return the keys for the documents: rows are used as they are, texts are cut."""
    from replug.data.rows import FILES_OF_ROWS, beir_folder
    from replug.data.sources.records import format_of
    from replug.data.sources.shards import files_of

    if documents is None and beir_folder(questions) is None:
        raise UserError("--documents is missing; expected a file of rows (id, text) or a folder of texts")
    documents = documents or questions
    formats = {format_of(path) for path in files_of(documents) or ()} if beir_folder(documents) is None else set()
    if not formats - {*FILES_OF_ROWS, None}:
        return {"data.corpus": documents}
    cut = {"data.tokenizer": "retriever", "data.document_tokens": 128}
    return {"data.source": documents, **cut, "data.query_share": 0, "data.heldout_share": 0}
