"""HotpotQA (Yang et al. 2018): its JSON array. Gold evidence are the sentences of `supporting_facts`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.evals.examples import Example
from replug.evals.internet.questions import InternetQuestion, given_evidence, identifier_of, rows_of_file, text_of
from replug.evals.open_qa import questions_of_rows


def read_hotpotqa(path: Path) -> list[InternetQuestion]:
    """Every question of a file. Raises UserError with file and place for what is missing or of another form."""
    return questions_of_rows(rows_of_file(path), _question, path)


def _question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    example = Example(
        id=identifier_of(row, ("_id", "id"), where),
        query=text_of(row, "question", where),
        group=text_of(row, "type", where) if row.get("type") is not None else "all",
    )
    evidence = given_evidence(row, where) or _supporting_sentences(row, where)
    return InternetQuestion(example, (text_of(row, "answer", where),), evidence)


def _supporting_sentences(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """In the order of `supporting_facts`. A few facts of the published set name a sentence behind a page's last one:
    those are passed over, as its evaluation does."""
    pages = dict(_pairs(row, "context", where))
    sentences = []
    for title, number in _pairs(row, "supporting_facts", where):
        of_page = pages.get(title)
        if not isinstance(of_page, list) or not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UserError(f"{where}: 'supporting_facts' names {[title, number]!r}, no sentence of 'context'")
        sentences += [str(sentence).strip() for sentence in of_page[number : number + 1]]
    return tuple(sentence for sentence in sentences if sentence)


def _pairs(row: Mapping[str, Any], field: str, where: str) -> list[tuple[str, Any]]:
    value = row.get(field)
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    ):
        raise UserError(
            f"{where}: field {field!r} must be a list of pairs, a page's title first, as in HotpotQA's files"
        )
    return [(pair[0], pair[1]) for pair in value]
