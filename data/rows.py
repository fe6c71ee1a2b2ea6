"""Read the user's own rows in place as documents, examples and questions, checked field by field.

A source is a file, a folder, a pattern with `*`, a dataset of the hub or a folder of BEIR; `sources.formats` parses
every format. Every error names file, line and id; fields that are not read are named once.

Rows of known data sets (BEIR, DPR, FlagEmbedding, lists of hits) have their fields by other names. Passages within rows
are documents too: a file of FlagEmbedding's or DPR's is a corpus and its queries at once. A passage without an id is
named by a hash of its words, so both readings give it one name.

Judgements (qrels) and runs are files of trec_eval; judgements may also be BEIR's tables (query-id, corpus-id, score),
runs MS MARCO's.
"""

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.files import file_sha256
from replug.data.records import Document, Example
from replug.data.sources import shards
from replug.data.sources.formats import SEPARATORS, TABS, count_rows_of, form_of, plan_hub, read_shard
from replug.data.sources.records import Rejected, SourceShard, format_of, names_in, nested, read_lines, say_unread
from replug.data.words import content_hash

log = logging.getLogger(__name__)

PlacedRow = tuple[str, dict[str, Any]]  # `file:line`, or `file, row N`, and its fields

CORPUS, TRAIN, DEV, TEST = "corpus", "train", "dev", "test"  # parts of a folder of BEIR
QUERIES = "queries"
SPLIT_OF_BEIR = {"corpus": CORPUS, "train": TRAIN, "dev": DEV, "heldout": TEST}  # by the key of `data`
FILES_OF_ROWS = ("jsonl", "json", "tsv", "parquet", "CSV")
# Fields that a cell of a table may hold as a list.
LISTS = ("answers", "answer", "golden_answers", "possible_answers", "gold", "candidates", "pos", "neg")
DOCUMENT_FIELDS = ("id", "text", "title", "domain", "source", "embedded_title")
EXAMPLE_FIELDS = ("id", "query", "context", "continuation", "domain", "source", "gold", "candidates")
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


def read_rows(source: str | Path, fields: Mapping[str, str] | None = None, part: str = CORPUS) -> Iterator[PlacedRow]:
    """Yield the rows of a source in order. `fields` renames fields (`data.fields`), and dots reach into nested ones.

    `part` selects the corpus or a split of a BEIR folder. Raises UserError with the place of a damaged row or file.
    """
    files = row_files(source, part)
    whole = (SourceShard(form_of(path), (str(path),)) for path in files or ())
    before = 0  # rows in earlier shards of a dataset
    for shard in plan_hub(str(source)) if files is None else whole:
        number, by_line = 0, shard.kind == "jsonl" or shard.kind in (TABS, *SEPARATORS)
        for number, row in read_shard(shard):
            place = before + number
            where = shard.names[0] + (f":{place}" if by_line else f", row {place}") * bool(place)
            if isinstance(row, Rejected):
                raise UserError(f"{where}: {row.detail}")
            if row is not None:
                if shard.kind in (TABS, *SEPARATORS):
                    row = {name: list_in(cell) if name in LISTS else cell for name, cell in row.items() if cell != ""}
                elif shard.kind in ("jsonl", "array"):
                    _require_utf8(row, where)
                yield where, _renamed(row, fields) if fields else row
        before += number if files is None else 0


def _require_utf8(row: dict[str, Any], where: str) -> None:
    """Raise UserError for half a surrogate pair, which JSON's escapes can hold and UTF-8 cannot."""
    for name, value in row.items():
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: field {name!r} holds half a surrogate pair") from error


def row_files(source: str | Path, part: str = CORPUS) -> list[Path] | None:
    """Return the files of rows in order; None for a dataset of the hub."""
    if (folder := beir_folder(source)) is not None:
        return [sorted(folder.glob(f"{CORPUS if part == CORPUS else QUERIES}.jsonl*"))[0]]
    try:
        paths = shards.files_of(str(source))
    except UserError as error:  # these rows are another key's
        raise UserError(str(error).removeprefix("data.source: ")) from error
    if paths is None or len(paths) == 1 or Path(source).expanduser().is_file():
        return paths
    read = [path for path in paths if format_of(path) in FILES_OF_ROWS]
    if not read:
        raise UserError(f"{source} holds no file of rows; expected JSON Lines, a JSON array, CSV, TSV or Parquet")
    return read


def beir_folder(source: str | Path) -> Path | None:
    """Return the folder if the source is one of BEIR: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`."""
    folder = Path(source).expanduser()
    has_both = folder.is_dir() and all(list(folder.glob(f"{name}.jsonl*")) for name in (CORPUS, QUERIES))
    return folder if has_both else None


def qrels_file(folder: Path, split: str) -> Path:
    """Return the judgements of a split of a BEIR folder. Raises UserError if it has none."""
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("qrels/*.tsv"))) or "none"
        raise UserError(f"{path} does not exist; {folder} has the splits {there}")
    return path


def rows_sha256(source: str | Path, part: str = CORPUS) -> str:
    """Return a hash of the rows' files; of a dataset of the hub, of its name."""
    files = row_files(source, part)
    if files is None:
        return hashlib.sha256(f"hub: {source}".encode()).hexdigest()
    if part != CORPUS and (folder := beir_folder(source)) is not None:
        files = [*files, qrels_file(folder, part)]
    sums = [file_sha256(path) for path in files]
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()


def count_rows(source: str | Path, part: str = CORPUS) -> int:
    """Count the rows of files; lines of JSON are not parsed. Raises UserError for a dataset of the hub."""
    if part != CORPUS and (folder := beir_folder(source)) is not None:
        return len(read_qrels(qrels_file(folder, part)))
    files = row_files(source, part)
    if files is None:
        raise UserError(f"{source} is a dataset of the hub, and its rows are not counted; give --documents N")
    return sum(map(count_rows_of, files))


def _renamed(row: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the row under other names; a new name replaces an existing field."""
    values = ((new, nested(row, old)) for old, new in fields.items())
    renamed = {new: value for new, value in values if value is not None}
    return {**{name: value for name, value in row.items() if name not in fields}, **renamed}


def list_in(cell: str) -> Any:
    """Parse a list of JSON; returns any other text unchanged."""
    if cell.startswith("[") and cell.endswith("]"):
        with suppress(ValueError):  # of half a surrogate pair too
            values = json.loads(cell)
            json.dumps(values, ensure_ascii=False).encode()
            return values
    return cell


# Documents and examples ----------------------------------------------------------------------------------------------


def read_documents(source: str | Path, fields: Mapping[str, str] | None = None) -> Iterator[Document]:
    """Yield rows with `id`, `text`, optional `title`, `domain`, `source`; a title is put before the text.

    A title alone is the text; an `embedded_title` stands before the text in the vector alone. Documents with
    neither, as in BEIR, are left out with a warning.
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
    if len(hashes) == empty:
        raise UserError(f"{source} holds no documents")
    ordered = np.sort(np.frombuffer(hashes, np.int64))
    if twice := set(ordered[1:][ordered[1:] == ordered[:-1]].tolist()):  # read again: two ids may have one hash
        seen: set[str] = set()
        for where, row, is_passage in document_rows(source, fields):
            if not is_passage and hash(doc_id := _identifier(row, where)) in twice:
                require_new(doc_id, seen, where)
    if empty:
        shown = f"{empty:,} of {len(hashes):,} documents have neither text nor title and are left out"
        log.warning(f"{source}: {shown}, first {first_empty}: data.fields={{NAME: text}} names another field")
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
    for number, (where, row) in enumerate(example_rows(source, fields, split)):
        is_question = "continuation" not in row and {"question", "answers"} <= row.keys()
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
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{label}: field '{name}' must be a string that is not blank, found {value!r}")
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
            answers = row.get("answers")
            if isinstance(answers, list) and answers and str(answers[0]).strip(" .").lower() == NO_ANSWER:
                raise UserError(f"{where}: field 'answers' is {answers[0]!r}; expected an answer. Remove such rows")
            if "answers" not in row:
                query = row.pop("question")
                row |= {"query": query, "context": ASKED, "continuation": f" {query}"}
        yield where, row


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


# Judgements and runs ------------------------------------------------------------------------------------------------


WHOLE_NUMBER = re.compile(r"-?\d+(\.0+)?")  # 1.0 is a grade too

Grades = dict[str, dict[str, int]]  # by query and document


def read_qrels(source: str | Path) -> Grades:
    """Return the grades of each query's documents. Raises UserError for a line of another form."""
    path, grades = Path(source).expanduser(), Grades()
    for number, cells in _cells(path, "judgements"):
        if len(cells) not in (3, 4):
            raise UserError(f"{path}:{number}: {len(cells)} columns; expected a query, a document and a grade")
        if not WHOLE_NUMBER.fullmatch(cells[-1]):
            if number == 1:  # the header
                continue
            raise UserError(f"{path}:{number}: {cells[-1]!r} is not a grade; expected a whole number")
        grades.setdefault(cells[0], {})[cells[-2]] = int(float(cells[-1]))
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


def _cells(path: Path, what: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line, which tabs or else blanks separate."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a file of {what}")
    for number, line in read_lines(SourceShard("tsv", (str(path),))):
        if isinstance(line, Rejected):
            raise UserError(f"{path}:{number}: {line.detail}")
        if line.strip():
            text = line.rstrip("\r\n")
            yield number, [cell.strip() for cell in (text.split("\t") if "\t" in text else text.split())]
