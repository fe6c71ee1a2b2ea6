"""StrategyQA (Geva et al. 2021): yes or no. Gold evidence are the `facts` of its JSON array, or of JSON Lines."""

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

LABELS = ("Yes", "No")


def read_strategyqa(path: Path) -> list[InternetQuestion]:
    """Every question of a file. Raises UserError with file and line for what is missing or of another form."""
    return questions_of_rows(rows_of_file(path), _question, path)


def _question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    answer = row.get("answer")
    if not isinstance(answer, bool):
        raise UserError(f"{where}: field 'answer' must be true or false, found {answer!r}")
    example = Example(identifier_of(row, ("qid", "id"), where), text_of(row, "question", where), "all")
    evidence = given_evidence(row, where) or tuple(fact.strip() for fact in texts_of(row, "facts", where))
    return InternetQuestion(example, (LABELS[0] if answer else LABELS[1],), evidence, labels=LABELS)
