"""The outcomes of an evaluation in its folder: a row for each example while it runs, and at the end a table of all.

outcomes.jsonl     {"id", "group", "source", "methods": {method: {"numbers", "detail"}}} of every example, as it came;
                   no source where none is known
examples.parquet   a row for each example and method: question, references, gold, prompt, documents, weights
                   (`final_weights` after the text), numbers and what the LM said
"""

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import RunError, UserError
from replug.data.files import replace_file, writing
from replug.evals.evidence import EvidenceBook

if TYPE_CHECKING:
    from replug.evals.loop import Task

log = logging.getLogger(__name__)

Row = dict[str, Any]


class OutcomeFile:
    """Rows as JSON lines, in the order they came. A torn line, which a kill leaves, is removed when the file is opened.

    Raises RunError if the disk does not take a row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        self.rows: list[Row] = []
        whole = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is not None:
                self.rows.append(row)
                whole.append(line)
            elif number < len(lines):  # the last one alone is what a kill leaves
                log.warning(f"{path}:{number} is damaged, and what it says is done again")
        if len(whole) < len(lines):
            replace_file(path, b"".join(whole))

    def append(self, row: Row) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self.rows.append(row)

    def by(self, key: str, known: Collection[str]) -> dict[str, Row]:
        """Return the row of each known value; the first where two processes wrote one.

        Raises UserError for a row of something else.
        """
        rows: dict[str, Row] = {}
        for number, row in enumerate(self.rows, start=1):
            if row.get(key) not in known:
                raise UserError(
                    f"{self.path}:{number} is of {key} {row.get(key)!r}, which is none of this evaluation's: bring its "
                    "texts or questions back, or give another out"
                )
            rows.setdefault(row[key], row)
        return rows


def outcomes_of(folder: Path, measured: str) -> OutcomeFile:
    """Open the outcomes of a measurement in a folder; those of any other measurement are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / "outcomes.jsonl", folder / "measured.json"
    if not mark.is_file() or mark.read_text() != measured:
        path.unlink(missing_ok=True)
        replace_file(mark, measured.encode())
    return OutcomeFile(path)


def write_examples(path: Path, rows: Sequence[Row], book: EvidenceBook, task: "Task") -> None:
    """Write as Parquet what was asked, what is right, what the LM read, and what it said."""
    written: list[Row] = []
    for place, (row, example) in enumerate(zip(rows, task.examples, strict=True)):
        of = book.of(place)
        for method, outcome in row["methods"].items():
            written.append(
                {
                    "id": row["id"],
                    "group": row["group"],
                    "method": method,
                    "question": example.query,
                    "gold": list(example.gold),
                    **task.shown(place, method, of[method]),
                    "documents": book.ids(of[method].doc_rows),
                    "weights": of[method].weights.tolist(),
                    **outcome["numbers"],
                    **outcome["detail"],
                }
            )
    # A column for every name, null where a row has no such number: Arrow would take those of the first row alone.
    names, partial = dict.fromkeys(name for row in written for name in row), path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(pa.table({name: [row.get(name) for row in written] for name in names}), partial)
        partial.replace(path)
