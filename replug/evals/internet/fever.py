"""FEVER (Thorne et al. 2018): JSONL of claims with one of three labels.

Its files name evidence by Wikipedia's pages and sentence numbers. The text is `gold_evidence`, else the documents of
the corpus whose ids are the pages of the first set of evidence. A claim with NOT ENOUGH INFO has no evidence.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.evals.examples import Example
from replug.evals.internet.questions import InternetQuestion, given_evidence, identifier_of, rows_of_file, text_of
from replug.evals.open_qa import questions_of_rows

LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")


def read_fever(path: Path) -> list[InternetQuestion]:
    """Every claim of a file. Raises UserError with file and line for what is missing or of another form."""
    return questions_of_rows(rows_of_file(path), _claim, path)


def _claim(row: Mapping[str, Any], where: str) -> InternetQuestion:
    label = text_of(row, "label", where)
    if label not in LABELS:
        raise UserError(f"{where}: label {label!r} is unknown; expected one of {', '.join(LABELS)}")
    sets = [tuple(dict.fromkeys(_pages(one, where))) for one in _evidence_sets(row, where)]
    example = Example(
        id=identifier_of(row, ("id",), where),
        query=text_of(row, "claim", where),
        group=label,
        gold=tuple(dict.fromkeys(page for pages in sets for page in pages)),
    )
    first = next((pages for pages in sets if pages), ())
    return InternetQuestion(example, (label,), given_evidence(row, where), first, LABELS)


def _evidence_sets(row: Mapping[str, Any], where: str) -> list[list[Any]]:
    value = row.get("evidence", [])
    if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
        raise UserError(f"{where}: field 'evidence' must be a list of sets of evidence, as in FEVER's files")
    return value


def _pages(evidence_set: list[Any], where: str) -> Iterator[str]:
    """Of [annotation, evidence, page, sentence]; the page is null where there is no evidence."""
    for item in evidence_set:
        if not isinstance(item, list) or len(item) != 4 or not isinstance(item[2], str | None):
            raise UserError(f"{where}: evidence {item!r} is not [annotation, evidence, page, sentence]")
        if item[2] is not None:
            yield item[2]
