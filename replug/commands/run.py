"""`replug train`, `replug evaluate` and `replug search`: the calls of `replug.library` as commands."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from replug import library
from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.config.plain_text import plain_json, plain_line, plain_text


def train(
    config: ConfigFile, overrides: Overrides = None, source: Source = None, retriever: Retriever = None, lm: LM = None
) -> None:
    """Tune a retriever to a frozen LM: prepare the data, index the corpus, train and evaluate.

    The same command resumes an unfinished run. RUN_DIR/results.json and RUN_DIR/report.html hold bits per byte on the
    held-out split.

    replug train own_data --source docs/ --retriever sentence-transformers/all-MiniLM-L6-v2 --lm gpt2
    """
    trainer = library.LSRTrainer(config=config, overrides=with_short_keys(overrides, source, retriever, lm))
    results = trainer.train()
    from replug.train.report import print_summary
    from replug.train.run_dir import RunDirectory

    print_summary(RunDirectory(Path(trainer.config.run_dir).expanduser()), results)


def evaluate(
    config: ConfigFile, overrides: Overrides = None, source: Source = None, retriever: Retriever = None, lm: LM = None
) -> None:
    """Evaluate retrievers and methods (configs/eval_*.yaml, configs/paper_tables/*.yaml).

    With the folder of a run, or a training configuration, compare its retriever with the tuned one on the run's own
    held-out texts. The same command resumes after an interruption.

    replug evaluate runs/mine
    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    library.evaluate(config, overrides=with_short_keys(overrides, source, retriever, lm))


def search(
    directory: Annotated[Path, typer.Argument(help="Run or index directory to search.")],
    text: Annotated[str, typer.Argument(help="Query.")],
    k: Annotated[int, typer.Option("--k", "-k", help="Number of documents to show.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the documents that a retriever finds for a query, the most similar first."""
    results = library.search(directory, text, k)
    if as_json:
        rows = [asdict(doc) | {"similarity": round(doc.similarity, 6)} for doc in results]
        print(plain_json({"index": str(directory), "query": text, "found": rows}))
        return
    for number, doc in enumerate(results, 1):  # escaped: documents may hold terminal commands
        print(f"[{number}] {doc.similarity:.3f}  {plain_line(doc.id)}\n{plain_text(doc.text)}\n")
