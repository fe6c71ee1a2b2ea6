"""The outcomes of an evaluation in its folder: a row for each example while it runs, and at the end a table of all.

outcomes.jsonl     {"id", "group", "methods": {method: {"numbers", "detail"}}} of every example, as it came
examples.parquet   a row for each example and method: question, references, gold, prompt, documents, weights, numbers
                   and what the LM said
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from replug.data.files import replace_file, writing
from replug.evals.evidence import Evidence, EvidenceBook
from replug.models.ensemble import document_weights

if TYPE_CHECKING:
    from replug.evals.loop import Task

Row = dict[str, Any]


class OutcomeFile:
    """Outcomes as JSON lines, one for each example, in order; a torn last line is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(_whole_lines(path))

    def append(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)


def _whole_lines(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    whole = path.read_bytes().rpartition(b"\n")[0]
    with path.open("r+b") as file:
        file.truncate(len(whole) + bool(whole))
    for line in whole.splitlines():
        yield json.loads(line)


def outcomes_of(folder: Path, measured: str) -> OutcomeFile:
    """The outcomes of what is measured, as far as a folder holds them; those of anything else are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / "outcomes.jsonl", folder / "measured.json"
    if not mark.is_file() or mark.read_text() != measured:
        path.unlink(missing_ok=True)
        replace_file(mark, measured.encode())
    return OutcomeFile(path)


def write_examples(path: Path, rows: Sequence[Row], book: EvidenceBook, task: "Task | None" = None) -> None:
    """As Parquet. Of a task the examples say what was asked, what is right, and what the LM read."""
    partial = path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(_table(list(example_rows(rows, book, task))), partial)
        partial.replace(path)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """A column for every name, null where a row has no such number: Arrow would take those of the first row alone."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def example_rows(rows: Sequence[Row], book: EvidenceBook, task: "Task | None" = None) -> Iterator[dict[str, Any]]:
    """One for each example and method: what was asked and is right, documents, weights, numbers, what the LM said."""
    for place, row in enumerate(rows):
        evidence = book.of(place)
        for method, outcome in row["methods"].items():
            yield {
                "id": row["id"],
                "group": row["group"],
                "method": method,
                **(_asked(task, place, method, evidence[method]) if task else {}),
                "documents": book.ids(evidence[method].doc_rows),
                "weights": [float(weight) for weight in document_weights(evidence[method].similarities)],
                **outcome["numbers"],
                **outcome["detail"],
            }


def _asked(task: "Task", row: int, method: str, evidence: Evidence) -> dict[str, Any]:
    from replug.evals.loop import ShownTask  # which imports this module

    example = task.examples[row]
    shown = task.shown(row, method, evidence) if isinstance(task, ShownTask) else {}
    return {"question": example.query, "gold": list(example.gold), **shown}
