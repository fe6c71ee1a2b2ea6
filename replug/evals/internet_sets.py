"""The public sets that are answered from searched passages, by the names that `questions.dataset` may say.

A row of any set may have `gold_evidence`, a text or a list of texts: what answers the question. It takes the place of
what the set itself gives, and is needed where the set gives none and `data.corpus` has no documents that it names.

nq           NQ-open (Lee et al. 2019): JSONL of `question` and `answer` (or `answers`). Evidence is the first of DPR's
             `positive_ctxs` (its files are JSON arrays), else the first document of `gold`, by its id in the corpus
hotpotqa     HotpotQA (Yang et al. 2018): its JSON array. Evidence is the sentences of `supporting_facts`
fever        FEVER (Thorne et al. 2018): JSONL of claims with one of three labels. Evidence is the documents whose ids
             are the pages of the first set of evidence. A claim with NOT ENOUGH INFO has none
strategyqa   StrategyQA (Geva et al. 2021): yes or no. Evidence is the `facts` of its JSON array, or of JSON Lines
situatedqa   SituatedQA (Zhang and Choi 2021): questions of Natural Questions with a date, or with a place; JSONL of its
             qa_data. `edited_question` says the date or place, and is asked. The rows of one `id` are one question at
             several dates. They have no evidence: `questions.demonstrations` are Natural Questions, as `nq` reads them
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.rows import read_json_array, read_json_lines
from replug.evals.loop import Item
from replug.evals.questions import (
    OpenQuestion,
    answers_field,
    name_of,
    open_question,
    questions_of_rows,
    text_of,
    texts_of,
)

GOLD_EVIDENCE = "gold_evidence"


@dataclass(frozen=True, slots=True)
class InternetQuestion(OpenQuestion):
    """A question with its accepted answers; the first one is shown in shots.

    `evidence` are texts that answer it; where there are none, `evidence_ids` name documents of the corpus that do.
    A question that neither has is one that nothing answers, or whose set tells no evidence. `labels` are all answers
    that there are, of a set of classification; none where answers are free.
    """

    evidence: tuple[str, ...] = ()
    evidence_ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """What variants of one question share: they are on one side of every split."""
        return self.example.source or self.example.id


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """How a public set is read, a question from a row. `metric` is what its answers are judged by.

    `of_shot` reads `questions.demonstrations`: None reads them as the same set, which has evidence of its own.
    """

    metric: str
    of_row: Callable[[Mapping[str, Any], str], InternetQuestion]
    of_shot: Callable[[Mapping[str, Any], str], InternetQuestion] | None = None

    def read(self, path: Path) -> list[InternetQuestion]:
        """Return every question of a file. Raises UserError with file and line for what is missing or malformed."""
        return questions_of_rows(rows_of_file(path), self.of_row, path)

    def read_shots(self, path: Path) -> list[InternetQuestion]:
        return questions_of_rows(rows_of_file(path), self.of_shot or self.of_row, path)


def rows_of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a JSON array (`.json`), or of JSON Lines, plain or gzip, each with where it stands."""
    return read_json_array(path) if path.suffix == ".json" else read_json_lines(path)


def given_evidence(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The texts of `gold_evidence`; none where the row has no such field."""
    if row.get(GOLD_EVIDENCE) is None:
        return ()
    if isinstance(row[GOLD_EVIDENCE], str):
        return (text_of(row, GOLD_EVIDENCE, where),)
    return texts_of(row, GOLD_EVIDENCE, where)


def _nq_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    found = open_question(row, where, answers_field(row, ("answer", "answers"), where))
    evidence = given_evidence(row, where)
    if not evidence:
        contexts = row.get("positive_ctxs") or []
        if not isinstance(contexts, list) or not all(isinstance(one, dict) for one in contexts):
            raise UserError(f"{where}: field 'positive_ctxs' must be a list of passages with 'title' and 'text'")
        place = f"{where}, the first of positive_ctxs"
        evidence = tuple(f"{text_of(one, 'title', place)}\n{text_of(one, 'text', place)}" for one in contexts[:1])
    return InternetQuestion(found.example, found.answers, evidence, found.example.gold[:1])


def _hotpotqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    example = Item(
        id=name_of(row, ("_id", "id"), where) or Path(where).name,
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


FEVER_LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")


def _claim(row: Mapping[str, Any], where: str) -> InternetQuestion:
    label = text_of(row, "label", where)
    if label not in FEVER_LABELS:
        raise UserError(f"{where}: label {label!r} is unknown; expected one of {', '.join(FEVER_LABELS)}")
    evidence = row.get("evidence", [])
    if not isinstance(evidence, list) or not all(isinstance(one, list) for one in evidence):
        raise UserError(f"{where}: field 'evidence' must be a list of sets of evidence, as in FEVER's files")
    sets = [tuple(dict.fromkeys(_pages(one, where))) for one in evidence]
    example = Item(
        id=name_of(row, ("id",), where) or Path(where).name,
        query=text_of(row, "claim", where),
        group=label,
        gold=tuple(dict.fromkeys(page for pages in sets for page in pages)),
    )
    first = next((pages for pages in sets if pages), ())
    return InternetQuestion(example, (label,), given_evidence(row, where), first, FEVER_LABELS)


def _pages(evidence_set: list[Any], where: str) -> Iterator[str]:
    """Of [annotation, evidence, page, sentence]; the page is null where there is no evidence."""
    for item in evidence_set:
        if not isinstance(item, list) or len(item) != 4 or not isinstance(item[2], str | None):
            raise UserError(f"{where}: evidence {item!r} is not [annotation, evidence, page, sentence]")
        if item[2] is not None:
            yield item[2]


STRATEGYQA_LABELS = ("Yes", "No")


def _strategyqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    answer = row.get("answer")
    if not isinstance(answer, bool):
        raise UserError(f"{where}: field 'answer' must be true or false, found {answer!r}")
    identifier = name_of(row, ("qid", "id"), where) or Path(where).name
    example = Item(identifier, text_of(row, "question", where), "all")
    evidence = given_evidence(row, where) or tuple(fact.strip() for fact in texts_of(row, "facts", where))
    return InternetQuestion(
        example, (STRATEGYQA_LABELS[0] if answer else STRATEGYQA_LABELS[1],), evidence, labels=STRATEGYQA_LABELS
    )


LAST_YEAR = 2020  # what an LM of the paper may have read; "after 2020" is 2021 or later
YEAR = re.compile(r"(?:.*\D)?(\d{4})")  # of "2014" and of "December 13, 1999"
GROUPS = {True: f"after {LAST_YEAR}", False: f"up to {LAST_YEAR}", None: "all"}


def _situatedqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    """Its id is the file's name and the line: of one `id`, several rows may even have one date."""
    year = None  # of one that is asked somewhere
    if row.get("date") is None:
        text_of(row, "location", where)
    else:
        found = YEAR.fullmatch(text_of(row, "date", where).strip())
        if found is None:
            raise UserError(
                f"{where}: date {row['date']!r} ends with no year; expected such as 2014 or December 13, 1999"
            )
        year = int(found[1])
    example = Item(
        id=Path(where).name,
        query=text_of(row, "edited_question", where),
        group=GROUPS[None if year is None else year > LAST_YEAR],
        source=name_of(row, ("id", "example_id"), where) or Path(where).name,
    )
    answers = tuple(dict.fromkeys(texts_of(row, "answer", where)))
    return InternetQuestion(example, answers, given_evidence(row, where))


EXACT_MATCH, ACCURACY = "exact_match", "accuracy"

QUESTION_SETS = {
    "nq": QuestionSet(EXACT_MATCH, _nq_question),
    "hotpotqa": QuestionSet(EXACT_MATCH, _hotpotqa_question),
    "fever": QuestionSet(ACCURACY, _claim),
    "strategyqa": QuestionSet(ACCURACY, _strategyqa_question),
    "situatedqa": QuestionSet(EXACT_MATCH, _situatedqa_question, _nq_question),
}
