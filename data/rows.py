"""The user's own rows as documents, examples and questions, checked field by field as they are read.

Every error names file, line and id; fields that are not read are named once. `row_files` reads the rows of any format.

Rows of known data sets (BEIR, DPR, FlagEmbedding, lists of hits) have their fields by other names. Passages within rows
are documents too: a file of FlagEmbedding's or DPR's is a corpus and its queries at once. A passage without an id is
named by a hash of its words, so both readings give it one name.
"""

import logging
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.records import Document, Example
from replug.data.row_files import TRAIN, PlacedRow, beir_folder, count_rows, list_in, qrels_file, read_qrels, read_rows
from replug.data.sources.records import names_in, say_unread
from replug.data.words import content_hash

log = logging.getLogger(__name__)

DOCUMENT_FIELDS = ("id", "text", "title", "domain", "source", "embedded_title")
EXAMPLE_FIELDS = ("id", "query", "context", "continuation", "domain", "source", "gold", "candidates")
MOST_EMPTY = 0.5  # of all documents: more mean that the text is in another field
QUESTION_FIELDS = ("id", "question", "answers", "domain", "source", "gold", "candidates")
# Fields with passages, best first, and whether their passages are gold.
PASSAGES = {
    "pos": True,
    "positive_ctxs": True,
    "neg": False,
    "hard_negative_ctxs": False,
    "negative_ctxs": False,
    "ctxs": False,
}
PASSAGE_IDS = ("passage_id", "psg_id", "id", "_id", "docid")
# Fields for answers in published sets, best known first: NQ-open, FlashRAG, PopQA, RAGAS.
ANSWERS = ("answers", "answer", "golden_answers", "possible_answers", "short_answers", "ground_truths", "ground_truth")
NO_ANSWER = "no answer present"  # MS MARCO's placeholder
# An example without an answer: the LM is to predict the query itself (UPR, Sachan et al. 2022).
ASKED = "Question:"


def read_documents(source: str | Path, fields: Mapping[str, str] | None = None) -> Iterator[Document]:
    """Yield rows with `id`, `text`, optional `title`, `domain`, `source`; a title is put before the text.

    A title alone is the text; an `embedded_title` stands before the text in the vector alone. Documents with
    neither, as in BEIR, are left out with a warning; raises UserError if most are empty.
    Passages of rows such as DPR's are documents too; repeated ones are skipped.
    """
    passages: dict[str, int] = {}  # hashes of their words by id
    names: dict[str, None] = {}
    hashes = array("q")  # of ids: 8 bytes for each of tens of millions
    empty, first_empty = 0, ""
    for where, row, is_passage in document_rows(source, fields):
        doc_id = _identifier(row, where)
        if is_passage:
            words = hash(one_line(_text(row, "text", where)))
            is_known = doc_id in passages
            if passages.setdefault(doc_id, words) != words:
                raise UserError(
                    f"{where}: passage {doc_id!r} has other words than before; expected an id that names one passage "
                    "in all rows, or passages without ids"
                )
            if is_known:
                continue
        else:
            names.update(dict.fromkeys(row))
        hashes.append(hash(doc_id))
        title, value = _optional(row, "title", where), row.get("text")
        parts = [title] if title else []
        if not isinstance(value, str) or value.strip():
            parts.append(_text(row, "text", where))
        if not "".join(parts).strip():
            empty, first_empty = empty + 1, first_empty or f"{where} (id {doc_id})"
            continue
        yield Document(
            id=doc_id,
            text="\n".join(parts),
            domain=_optional(row, "domain", where) or "all",
            source=_optional(row, "source", where) or doc_id,
            embedded_title=_optional(row, "embedded_title", where) or "",
        )
    if not hashes:
        raise UserError(f"{source} holds no documents")
    ordered = np.sort(np.frombuffer(hashes, np.int64))
    if twice := set(ordered[1:][ordered[1:] == ordered[:-1]].tolist()):  # read again: two ids may have one hash
        seen: set[str] = set()
        for where, row, is_passage in document_rows(source, fields):
            if not is_passage and hash(doc_id := _identifier(row, where)) in twice:
                require_new(doc_id, seen, where)
    if empty > MOST_EMPTY * len(hashes):
        raise UserError(
            f"{first_empty}: field 'text' is empty, as in {empty:,} of {len(hashes):,} documents; expected texts: "
            "data.fields={NAME: text} names another field"
        )
    if empty:
        log.warning(f"{source}: {empty:,} documents have neither text nor title and are left out, first {first_empty}")
    say_unread(source, names, DOCUMENT_FIELDS)


def count_documents(source: str | Path, fields: Mapping[str, str] | None = None) -> int:
    """Count documents: the rows of files, or the passages in rows such as DPR's. Raises UserError for the hub's."""
    rows = count_rows(source)
    _, _, has_passages = next(document_rows(source, fields), ("", {}, False))
    return sum(1 for _ in read_documents(source, fields)) if has_passages else rows


def read_examples(source: str | Path, fields: Mapping[str, str] | None = None, split: str = TRAIN) -> list[Example]:
    """Return rows with `context`, `continuation`, optional `query`, `id`, `domain`, `source`, `gold`, `candidates`.

    Or rows with `question` and `answers`, as published sets name them (`ANSWERS`): the question is the query,
    its prompt the context, the first answer the continuation.
    """
    examples: list[Example] = []
    seen: set[str] = set()
    names: dict[str, None] = {}
    read: dict[str, None] = {}
    first_of: dict[bool, str] = {}  # place of the first question with an answer, and of the first without
    for number, (where, row) in enumerate(example_rows(source, fields, split)):
        is_question = "continuation" not in row and {"question", "answers"} <= row.keys()
        if is_question or row.get("context") == ASKED:
            first = first_of.setdefault(is_question, where)
            if len(first_of) == 2 and first == where:
                raise UserError(
                    f"{where}: this question has {'an' if is_question else 'no'} answer, but that of "
                    f"{first_of[not is_question]} has {'none' if is_question else 'one'}; expected answers in all rows "
                    f"or in none, since the LM learns to predict them or the question. The fields here: {names_in(row)}"
                )
        names.update(dict.fromkeys(row))
        read.update(dict.fromkeys(QUESTION_FIELDS if is_question else EXAMPLE_FIELDS))
        examples.append(_example(row, where, number, is_question))
        require_new(examples[-1].id, seen, where)
    if not examples:
        raise UserError(f"{source} holds no texts")
    say_unread(source, names, list(read))
    if unanswered := sum(example.context == ASKED for example in examples):
        log.info(f"{source}: {unanswered:,} of {len(examples):,} rows have no answer: the LM predicts the query")
    return examples


def _example(row: dict[str, Any], where: str, number: int, is_question: bool) -> Example:
    if is_question:
        query = _text(row, "question", where)
        context, continuation = question_prompt(query), f" {one_line(texts_of(row, 'answers', where)[0])}"
    else:
        query = _text(row, "query", where) if row.get("query") is not None else ""
        context, continuation = _text(row, "context", where), _text(row, "continuation", where)
    return Example(
        id=_identifier(row, where) if "id" in row else str(number),
        context=context,
        continuation=continuation,
        domain=_optional(row, "domain", where) or "all",
        source=_optional(row, "source", where),
        gold=ids_of(row, "gold", where),
        query=query,
        candidates=ids_of(row, "candidates", where),
    )


def ids_of(row: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    """Return a field that may be a list of ids of documents. Raises UserError with where it stands."""
    ids = row.get(field) or []
    if not isinstance(ids, list) or not all(isinstance(item, str | int) for item in ids):
        raise UserError(f"{where}: field {field!r} must be a list of document ids")
    return tuple(map(str, ids))


def question_prompt(question: str) -> str:
    """Return the prompt of a question, to be followed by a space and the answer."""
    return f"Question: {one_line(question)}\nAnswer:"


def one_line(text: str) -> str:
    """Replace white space of every kind by single spaces: a line of a prompt must not become several."""
    return " ".join(text.split())


def texts_of(row: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    """Return a field that must be a list of texts, at least one. Raises UserError with where it stands."""
    value = row.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item.strip() for item in value):
        raise UserError(
            f"{where}: field {field!r} must be a list of texts, at least one, found {value!r}; the fields here are "
            f"{names_in(row)}"
        )
    return tuple(value)


def require_new(identifier: str, seen: set[str], where: str) -> None:
    if identifier in seen:
        raise UserError(f"{where}: id {identifier!r} occurs twice; ids must be unique")
    seen.add(identifier)


def _identifier(row: dict[str, Any], where: str) -> str:
    if not (identifier := _optional(row, "id", where)):
        raise UserError(f"{where}: field 'id' is {_absent(row, 'id')}")
    return identifier


def _absent(row: dict[str, Any], name: str) -> str:
    if name in row:
        return "null or empty; expected a value"
    return f"missing; the fields here are {names_in(row)}: give data.fields.NAME={name}, or rename one"


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    label = where if row.get("id") is None else f"{where} (id {row['id']})"
    if value is None:
        raise UserError(f"{label}: field '{name}' is {_absent(row, name)}")
    if not isinstance(value, str):
        raise UserError(f"{label}: field '{name}' must be a string, found {type(value).__name__}")
    if not value.strip():
        raise UserError(f"{label}: field '{name}' is empty")
    return value


def _optional(row: dict[str, Any], name: str, where: str) -> str | None:
    value = row.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise UserError(f"{where}: field '{name}' must be a string or an integer, found {type(value).__name__}")
    return None if value is None else str(value)


# Known data sets ---------------------------------------------------------------------------------------------


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

    `candidates` and `gold` are ids of the passages of the row; in a folder of BEIR `gold` comes from the split's qrels.
    """
    for where, row in question_rows(source, fields, split):
        if "question" in row and not ({"context", "continuation"} & row.keys()):
            _require_answer(row, where)
            if "answers" not in row:
                query = row.pop("question")
                row |= {"query": query, "context": ASKED, "continuation": f" {query}"}
        yield where, row


def _require_answer(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a question with a null answer: without one the LM would learn the question instead."""
    null = next((name for name in ANSWERS if name in row and row[name] is None), None)
    answers = row.get("answers")
    nothing = isinstance(answers, list) and bool(answers) and str(answers[0]).strip(" .").lower() == NO_ANSWER
    if (null and answers is None) or nothing:
        problem = f"field {null!r} is null" if answers is None else f"field 'answers' is {answers[0]!r}"
        raise UserError(f"{where}: {problem}; expected an answer. Remove rows without one")


def question_rows(source: str | Path, fields: Mapping[str, str] | None = None, split: str = "") -> Iterator[PlacedRow]:
    """Yield rows with `question`, `answers` where a row has some, and `gold` and `candidates` by id.

    In a folder of BEIR, only the questions of the split, if one is given.
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
            passages = list(_passages(row, where))
            row["candidates"] = list(dict.fromkeys(passage["id"] for passage in passages))
            row.setdefault("gold", [passage["id"] for passage in passages if passage["is_gold"]])
            row = {name: value for name, value in row.items() if name not in PASSAGES}
        if grades is not None:
            if (of := grades.get(str(row.get("id")))) is None:
                continue
            row["gold"] = [doc for doc, grade in of.items() if grade > 0]
        yield where, row


def _with_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a question's row with `answers` as a list, also from an answer with aliases or a single text."""
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
