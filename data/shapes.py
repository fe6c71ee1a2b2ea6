"""Rows of known data sets as documents, examples and questions: BEIR, DPR, FlagEmbedding and lists of hits.

Passages within rows are documents too: a file of FlagEmbedding's or DPR's is a corpus and its queries at once. A
passage without an id is named by a hash of its words, so both readings give it one name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.hashing import content_hash
from replug.data.judgements import read_qrels
from replug.data.row_files import TRAIN, PlacedRow, beir_folder, list_in, qrels_file, read_rows

# Fields with passages, best first, and whether these are known to be right.
PASSAGES = {
    "pos": True,
    "positive_ctxs": True,
    "neg": False,
    "hard_negative_ctxs": False,
    "negative_ctxs": False,
    "ctxs": False,
}
PASSAGE_IDS = ("passage_id", "psg_id", "id", "_id", "docid")
# Where published sets have the answers of a question, best known first: NQ-open, FlashRAG, PopQA, RAGAS.
ANSWERS = ("answers", "answer", "golden_answers", "possible_answers", "short_answers", "ground_truths", "ground_truth")
NO_ANSWER = "no answer present"  # what MS MARCO has instead
# An example without an answer: the LM is to predict the query itself (UPR, Sachan et al. 2022).
ASKED = "Question:"


def document_rows(source: str | Path, fields: Mapping[str, str] | None = None) -> Iterator[tuple[str, dict, bool]]:
    """Yield the documents of a source with their places, and whether they are passages of a row, which may repeat."""
    for where, row in read_rows(source, fields):
        if "text" not in row and any(name in row for name in PASSAGES):
            yield from ((where, passage, True) for passage in _passages(row, where))
        else:
            yield where, _with_id(row), False


def example_rows(
    source: str | Path, fields: Mapping[str, str] | None = None, split: str = TRAIN
) -> Iterator[PlacedRow]:
    """Yield examples with `question` and `answers`, or `context` and `continuation`, and optional `query`.

    `candidates` and `gold` are ids of the passages of the row; in a folder of BEIR `gold` is that of the split.
    """
    for where, row in question_rows(source, fields, split):
        if "question" in row and not ({"context", "continuation"} & row.keys()):
            _require_answer(row, where)
            if "answers" not in row:
                query = row.pop("question")
                row |= {"query": query, "context": ASKED, "continuation": f" {query}"}
        yield where, row


def _require_answer(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a question whose answer is said to be none: the LM would learn another thing of it."""
    null = next((name for name in ANSWERS if name in row and row[name] is None), None)
    said = row.get("answers")
    nothing = isinstance(said, list) and bool(said) and str(said[0]).strip(" .").lower() == NO_ANSWER
    if (null and said is None) or nothing:
        found = f"field {null!r} is null" if said is None else f"field 'answers' is {said[0]!r}"
        raise UserError(f"{where}: {found}; expected an answer. Remove rows without one")


def question_rows(source: str | Path, fields: Mapping[str, str] | None = None, split: str = "") -> Iterator[PlacedRow]:
    """Yield rows with `question`, `answers` where a row has some, and `gold` and `candidates` by id.

    They are the questions of a BEIR split, or all.
    """
    folder = beir_folder(source) if split else None
    grades = read_qrels(qrels_file(folder, split)) if folder else None
    for where, row in read_rows(source, fields, split or TRAIN):
        row = _with_id(row)
        if (name := next((name for name in ("query", "text") if name in row), None)) and not (
            {"question", "context"} & row.keys()
        ):
            row["question"] = row.pop(name)
        row = _with_answers(row)
        if any(name in row for name in PASSAGES):
            found = list(_passages(row, where))
            row["candidates"] = list(dict.fromkeys(passage["id"] for passage in found))
            row.setdefault("gold", [passage["id"] for passage in found if passage["is_gold"]])
            row = {name: value for name, value in row.items() if name not in PASSAGES}
        if grades is not None:
            if (of := grades.get(str(row.get("id")))) is None:
                continue
            row["gold"] = [doc for doc, grade in of.items() if grade > 0]
        yield where, row


def _with_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a question with its answers as `answers`, a list: of an answer with aliases, or of one text."""
    name = next((name for name in ANSWERS if row.get(name) is not None), None)
    if name is None or "question" not in row:
        return row
    value = row[name]
    if isinstance(value, dict):  # of TriviaQA, and of SQuAD
        texts = value.get("text") if "value" not in value else [value["value"], *(value.get("aliases") or [])]
        value = list(dict.fromkeys(texts)) if isinstance(texts, list) else texts
    if isinstance(value, str):
        value = list_in(value)
        value = [value] if isinstance(value, str) and not value.startswith("[") else value
    return {**{other: kept for other, kept in row.items() if other != name}, "answers": value}


def _with_id(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with BEIR's `_id` as its id."""
    return row if "_id" not in row or "id" in row else {"id": row.pop("_id"), **row}


def _passages(row: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    for name, is_gold in PASSAGES.items():
        passages = row.get(name) or []
        if not isinstance(passages, list):
            raise UserError(f"{where}: field {name!r} must be a list of passages, found {type(passages).__name__}")
        for passage in passages:
            one = passage if isinstance(passage, dict) else {"text": passage}
            if not isinstance(one.get("text"), str):
                raise UserError(f"{where}: a passage of {name!r} must be a text, or have one, found {passage!r}")
            title = one.get("title") or ""
            identifier = next((one[key] for key in PASSAGE_IDS if one.get(key) not in (None, "")), None)
            if identifier is None:
                identifier = content_hash(f"{title}\n{one['text']}" if title else one["text"]).hex()
            yield {"id": str(identifier), "text": one["text"], "title": title, "is_gold": is_gold}
