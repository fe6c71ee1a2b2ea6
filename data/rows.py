"""The user's own rows: JSON Lines of documents and of texts, checked field by field as they are read.

Documents may also be a table such as DPR's `psgs_w100.tsv`: a header, tabs, quotes doubled within quotes, a row on each
line. Every error names file, line and id; fields that are not read are named once. Files may be compressed as sources
may be.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.records import Document, Example
from replug.data.sources.formats import ROWS, format_of
from replug.data.sources.lines import DECODER, json_object, other_format, read_lines
from replug.data.sources.records import FieldMap, Rejected, SourceShard
from replug.data.sources.row_texts import names_in, say_unread

DOCUMENT_FIELDS = ("id", "text", "title", "domain", "source")
EXAMPLE_FIELDS = ("id", "query", "context", "continuation", "domain", "source", "gold")
QUESTION_FIELDS = ("id", "question", "answers", "domain", "source", "gold")


def read_documents(path: Path) -> Iterator[Document]:
    """Yield rows with `id`, `text`, optional `title`, `domain`, `source`; a title is put before the text."""
    seen: set[str] = set()
    names: dict[str, None] = {}
    is_table = _is_table(path)
    for where, row in read_table(path) if is_table else read_json_lines(path):
        names.update(dict.fromkeys(row))
        if is_table and not {"id", "text"} <= row.keys():
            raise UserError(f"{path}: expected a table whose first line has id and text; its cells are {names_in(row)}")
        doc_id = _identifier(row, where)
        require_new(doc_id, seen, where)
        title = _optional(row, "title", where)
        text = _text(row, "text", where)
        yield Document(
            id=doc_id,
            text=f"{title}\n{text}" if title else text,
            domain=_optional(row, "domain", where) or "all",
            source=_optional(row, "source", where) or doc_id,
        )
    if not seen:
        raise UserError(f"{path} holds no documents")
    say_unread(path, names, DOCUMENT_FIELDS)


def count_rows(path: Path) -> int:
    """Count the rows of a file of JSON Lines or a table, without a table's header; fields are not read."""
    return max(0, sum(1 for _ in _lines(path, "a file of rows")) - _is_table(path))


def _is_table(path: Path) -> bool:
    return format_of(path) == "tsv"


def read_examples(path: Path) -> list[Example]:
    """Return rows with `context`, `continuation`, optional `query`, `id`, `domain`, `source`, `gold`.

    Or rows with `question` and `answers`: the question is the query, its prompt the context, the first answer the
    continuation.
    """
    examples: list[Example] = []
    seen: set[str] = set()
    names: dict[str, None] = {}
    read: dict[str, None] = {}
    for number, (where, row) in enumerate(read_json_lines(path)):
        is_question = "continuation" not in row and {"question", "answers"} <= row.keys()
        names.update(dict.fromkeys(row))
        read.update(dict.fromkeys(QUESTION_FIELDS if is_question else EXAMPLE_FIELDS))
        examples.append(_example(row, where, number, is_question))
        require_new(examples[-1].id, seen, where)
    if not examples:
        raise UserError(f"{path} holds no texts")
    say_unread(path, names, list(read))
    return examples


def _example(row: dict[str, Any], where: str, number: int, is_question: bool) -> Example:
    gold = row.get("gold") or []
    if not isinstance(gold, list) or not all(isinstance(item, str | int) for item in gold):
        raise UserError(f"{where}: field 'gold' must be a list of document ids")
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
        gold=tuple(str(item) for item in gold),
        query=query,
    )


def question_prompt(question: str) -> str:
    """Return what an LM reads of a question before it answers; an answer follows with a space before it."""
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


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object with where it stands (`file:line`); blank lines are passed over."""
    for where, line in _lines(path, "a file of JSON Lines"):
        row = json_object(line)
        if isinstance(row, tuple):
            raise UserError(f"{where}: {row[1]}")
        if b"\\ud" in line.lower():
            _require_whole_characters(row, where)
        yield where, row


def read_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a table with tabs as a dict by its header, with where it stands; skip blank lines."""
    _require_file(path, "a table with a header and tabs")
    for number, row in ROWS["tsv"](SourceShard("tsv", (str(path),)), FieldMap()):
        if isinstance(row, Rejected):
            raise UserError(f"{path}:{number}: {row.detail}")
        if row is not None:
            yield f"{path}:{number}", row


def _lines(path: Path, expected: str) -> Iterator[tuple[str, bytes]]:
    _require_file(path, expected)
    for number, line in read_lines(SourceShard("jsonl", (str(path),))):
        if isinstance(line, Rejected):
            raise UserError(f"{path}:{number}: {line.detail}")
        if line is not None:
            yield f"{path}:{number}", line


def _require_file(path: Path, expected: str) -> None:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected {expected}")
    if format_of(path) == "CSV":
        raise UserError(f"{path} is CSV; expected {expected}: convert it")
    if found := other_format(path):
        raise UserError(f"{path} is, by its first bytes, {found}; expected {expected}: convert it")


def read_json_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON array, named by their places."""
    _require_file(path, "a JSON array of questions")
    try:
        rows = DECODER.decode(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # also of what is not UTF-8
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a JSON array of questions, found {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, question {number}: expected an object, found {type(row).__name__}")
        _require_whole_characters(row, f"{path}, question {number}")
        yield f"{path}, question {number}", row


def _require_whole_characters(row: dict[str, Any], where: str) -> None:
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: field {name!r} holds half a surrogate pair") from error


def require_new(identifier: str, seen: set[str], where: str) -> None:
    if identifier in seen:
        raise UserError(f"{where}: id {identifier!r} occurs twice; ids must be unique")
    seen.add(identifier)


def _identifier(row: dict[str, Any], where: str) -> str:
    value = row.get("id")
    if value is None:
        raise UserError(f"{where}: field 'id' is {_absent(row, 'id')}")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{where}: field 'id' must be a string or an integer, found {value!r}")
    return str(value)


def _absent(row: dict[str, Any], name: str) -> str:
    return "null; expected a value" if name in row else f"missing; the fields here are {names_in(row)}: rename one"


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
        raise UserError(f"{where}: field '{name}' must be a string, found {type(value).__name__}")
    return None if value is None else str(value)
