"""`replug search`: show what a retriever finds for a text, without Ray."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from replug import library
from replug.config.plain_text import plain_json, plain_line, plain_text


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
    for number, doc in enumerate(results, 1):  # documents may hold a terminal's commands: they are shown as text
        print(f"[{number}] {doc.similarity:.3f}  {plain_line(doc.id)}\n{plain_text(doc.text)}\n")
