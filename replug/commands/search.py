"""`replug search`: show what retrievers find for a text, without Ray."""

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
    against: Annotated[Path | None, typer.Option(help="Second run or index directory, shown side by side.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per directory.")] = False,
) -> None:
    """Show the documents that a retriever finds for a query; with --against, those of two retrievers."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    answers = [(place, library.search(place, text, k)) for place in (directory, against) if place is not None]
    if as_json:
        for place, results in answers:
            rows = [asdict(doc) | {"similarity": round(doc.similarity, 6)} for doc in results]
            print(plain_json({"index": str(place), "query": text, "found": rows}))
        return
    console = Console()
    panels = []
    for place, results in answers:  # documents may hold markup or a terminal's commands: both are shown as text
        shown = "\n\n".join(
            f"[{i}] {doc.similarity:.3f}  {plain_line(doc.id)}\n{plain_text(doc.text)}"
            for i, doc in enumerate(results, 1)
        )
        width = console.width // len(answers) - 1
        panels.append(Panel(Text(shown), title=Text(plain_line(str(place))), width=width))
    console.print(Columns(panels))
