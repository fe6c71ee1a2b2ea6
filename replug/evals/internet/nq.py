"""NQ-open (Lee et al. 2019): JSONL of `question` and `answer` (or `answers`), and what may tell gold evidence.

Evidence is `gold_evidence`, else the first of DPR's `positive_ctxs` (its files are JSON arrays), else the first
document of `gold`, by its id in the corpus.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.evals.internet.questions import InternetQuestion, given_evidence, rows_of_file, text_of
from replug.evals.open_qa import open_question, questions_of_rows


def read_nq(path: Path) -> list[InternetQuestion]:
    """Every question of a file. Raises UserError with file and line for what is missing or of another form."""
    return questions_of_rows(rows_of_file(path), _question, path)


def _question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    given = [name for name in ("answer", "answers") if row.get(name) is not None]
    if len(given) != 1:
        raise UserError(f"{where}: expected the field 'answer' or 'answers', found {' and '.join(given) or 'neither'}")
    found = open_question(row, where, given[0])
    evidence = given_evidence(row, where) or _of_dpr(row, where)
    return InternetQuestion(found.example, found.answers, evidence, found.example.gold[:1])


def _of_dpr(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    contexts = row.get("positive_ctxs") or []
    if not isinstance(contexts, list) or not all(isinstance(one, dict) for one in contexts):
        raise UserError(f"{where}: field 'positive_ctxs' must be a list of passages with 'title' and 'text'")
    place = f"{where}, the first of positive_ctxs"
    return tuple(f"{text_of(one, 'title', place)}\n{text_of(one, 'text', place)}" for one in contexts[:1])
