"""Judgements (qrels) and runs: which documents are right for a query, and which ones a retriever ranked first.

Files are those of trec_eval; judgements may also be BEIR's tables (query-id, corpus-id, score), runs MS MARCO's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from replug.config.errors import UserError
from replug.data.files import replace_file
from replug.data.sources.lines import read_lines
from replug.data.sources.records import Rejected, SourceShard

Grades = dict[str, dict[str, int]]  # by query and document


def read_qrels(source: str | Path) -> Grades:
    """Return the grades of each query's documents. Raises UserError for a line of another form."""
    path, grades = Path(source).expanduser(), Grades()
    for number, cells in _cells(path, "judgements"):
        if len(cells) not in (3, 4):
            raise UserError(f"{path}:{number}: {len(cells)} columns; expected a query, a document and a grade")
        try:
            grade = float(cells[-1])  # 1.0 is a grade too, and no header
        except ValueError:
            if not grades:  # the header
                continue
            grade = math.nan
        if not grade.is_integer():
            raise UserError(f"{path}:{number}: {cells[-1]!r} is not a grade; expected a whole number")
        grades.setdefault(cells[0], {})[cells[-2]] = int(grade)
    if not grades:
        raise UserError(f"{path} holds no judgements")
    return grades


def read_run(path: Path) -> dict[str, list[str]]:
    """Return the documents of each query, best first: by score in TREC's form, by rank in MS MARCO's."""
    by_query: dict[str, dict[str, float]] = {}
    for number, cells in _cells(path, "a run"):
        if len(cells) not in (3, 6):
            raise UserError(
                f"{path}:{number}: {len(cells)} columns; expected six (query Q0 document rank score tag), or three "
                "(query, document, rank)"
            )
        document, score = (cells[1], f"-{cells[2]}") if len(cells) == 3 else (cells[2], cells[4])
        try:
            by_query.setdefault(cells[0], {})[document] = float(score)
        except ValueError:
            raise UserError(f"{path}:{number}: {score.removeprefix('-')!r} is not a number") from None
    return {query: sorted(scores, key=lambda doc: -scores[doc]) for query, scores in by_query.items()}


def write_run(path: Path, rankings: Iterable[tuple[str, Sequence[str]]], tag: str) -> None:
    """Write each query's documents, best first, in TREC's form.

    trec_eval and `ir-measures` order by score alone, so scores fall by one from rank to rank: no two are equal.
    """
    lines = (
        f"{_word(query)} Q0 {_word(document)} {rank} {len(documents) - rank + 1} {tag}\n"
        for query, documents in rankings
        for rank, document in enumerate(documents, start=1)
    )
    replace_file(path, "".join(lines).encode())


def _word(identifier: str) -> str:
    """Return an id without blanks, which separate the columns."""
    return "_".join(identifier.split())


def _cells(path: Path, what: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line, which tabs or else blanks separate."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a file of {what}")
    for number, line in read_lines(SourceShard("tsv", (str(path),))):
        if isinstance(line, Rejected):
            raise UserError(f"{path}:{number}: {line.detail}")
        if line.strip():
            text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
            yield number, [cell.strip() for cell in (text.split("\t") if "\t" in text else text.split())]
