"""SituatedQA (Zhang and Choi 2021): questions of Natural Questions with a date, or with a place; JSONL of its qa_data.

What is asked is `edited_question`, which says the date or place. The rows of one `id` are one question at several
dates. They have no evidence: `questions.demonstrations` are Natural Questions, as `nq` reads them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.evals.examples import Example
from replug.evals.internet.questions import (
    InternetQuestion,
    given_evidence,
    identifier_of,
    rows_of_file,
    text_of,
    texts_of,
)
from replug.evals.open_qa import questions_of_rows

LAST_YEAR = 2020  # what an LM of the paper may have read; "after 2020" is 2021 or later
YEAR = re.compile(r"(?:.*\D)?(\d{4})")  # of "2014" and of "December 13, 1999"
GROUPS = {True: f"after {LAST_YEAR}", False: f"up to {LAST_YEAR}", None: "all"}


def read_situatedqa(path: Path) -> list[InternetQuestion]:
    """Every question of a file. Raises UserError with file and line for what is missing or of another form."""
    return questions_of_rows(rows_of_file(path), _question, path)


def _question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    """Its id is the file's name and the line: of one `id`, several rows may even have one date."""
    year = _year(row, where)
    if year is None:
        text_of(row, "location", where)
    example = Example(
        id=Path(where).name,
        query=text_of(row, "edited_question", where),
        group=GROUPS[None if year is None else year > LAST_YEAR],
        source=identifier_of(row, ("id", "example_id"), where),
    )
    answers = tuple(dict.fromkeys(texts_of(row, "answer", where)))
    return InternetQuestion(example, answers, given_evidence(row, where), year=year)


def _year(row: Mapping[str, Any], where: str) -> int | None:
    """When a question is asked; None of one that is asked somewhere."""
    if row.get("date") is None:
        return None
    found = YEAR.fullmatch(text_of(row, "date", where).strip())
    if found is None:
        raise UserError(f"{where}: date {row['date']!r} ends with no year; expected such as 2014 or December 13, 1999")
    return int(found[1])
