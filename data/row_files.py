"""Read the user's own rows in place: a file, a folder, a pattern with `*`, a dataset of the hub or a folder of BEIR.

`sources.formats` parses every format; here an unreadable row is an error with its place. `replug.data.rows` interprets
the rows of known data sets.

Judgements (qrels) and runs are files of trec_eval; judgements may also be BEIR's tables (query-id, corpus-id, score),
runs MS MARCO's.
"""

import hashlib
import json
import logging
import math
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path
from token import ENDMARKER, NEWLINE, NL, STRING
from tokenize import TokenError, generate_tokens
from typing import Any

from replug.config.errors import UserError
from replug.data.files import file_sha256
from replug.data.sources import shards
from replug.data.sources.formats import SEPARATORS, TABS, count_rows_of, form_of, plan_hub, read_shard
from replug.data.sources.records import Rejected, SourceShard, format_of, nested, read_lines

log = logging.getLogger(__name__)

PlacedRow = tuple[str, dict[str, Any]]  # `file:line`, or `file, row N`, and its fields

CORPUS, TRAIN, DEV, TEST = "corpus", "train", "dev", "test"  # parts of a folder of BEIR
QUERIES = "queries"
SPLIT_OF_BEIR = {"corpus": CORPUS, "train": TRAIN, "dev": DEV, "heldout": TEST}  # by the key of `data`
FILES_OF_ROWS = ("jsonl", "json", "tsv", "parquet", "CSV")
# Fields that a cell of a table may hold as a list.
LISTS = ("answers", "answer", "golden_answers", "possible_answers", "gold", "candidates", "pos", "neg")
BETWEEN_TOKENS = (NL, NEWLINE, ENDMARKER)


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
                row = _checked(row, shard.kind, where)
                yield where, _renamed(row, fields) if fields else row
        before += number if files is None else 0


def _checked(row: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return the row; a table's row without empty cells, and with lists parsed.

    Raises UserError for half a surrogate pair, which UTF-8 cannot encode.
    """
    if kind in ("jsonl", "array"):
        for name, value in row.items():
            if isinstance(value, str) and value.isascii():  # instant for a text of any length
                continue
            try:
                (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: field {name!r} holds half a surrogate pair") from error
    elif kind in (TABS, *SEPARATORS):
        return {name: list_in(cell) if name in LISTS else cell for name, cell in row.items() if cell != ""}
    return row


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
    log.info(f"{source}: the rows of {len(read):,} files are read, from {read[0].name} to {read[-1].name}")
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
    """Parse a list in the notation of JSON, Python or numpy; returns any other text unchanged.

    numpy and pandas write `['a' 'b']` without commas, which Python would read as one text.
    """
    if not (cell.startswith("[") and cell.endswith("]")):
        return cell
    with suppress(ValueError):  # first, since Python reads JSON's pairs of surrogates as two characters
        return json.loads(cell)
    try:
        tokens = [token for token in generate_tokens(StringIO(cell).readline) if token.type not in BETWEEN_TOKENS]
        texts = [token for token in tokens if token.type == STRING]
        are_apart = all(before.end != after.start for before, after in pairwise(texts))
        if len(texts) == len(tokens) - 2 and are_apart:  # nothing but texts between the brackets
            return [literal_eval(token.string) for token in texts]
        return literal_eval(cell)
    except (ValueError, SyntaxError, TokenError):
        return cell


# Judgements and runs ------------------------------------------------------------------------------------------------


Grades = dict[str, dict[str, int]]  # by query and document


def read_qrels(source: str | Path) -> Grades:
    """Return the grades of each query's documents. Raises UserError for a line of another form."""
    path, grades = Path(source).expanduser(), Grades()
    for number, cells in _cells(path, "judgements"):
        if len(cells) not in (3, 4):
            raise UserError(f"{path}:{number}: {len(cells)} columns; expected a query, a document and a grade")
        try:
            grade = float(cells[-1])  # 1.0 is a grade too, and no header
        except ValueError:
            if not grades:  # the header
                continue
            grade = math.nan
        if not grade.is_integer():
            raise UserError(f"{path}:{number}: {cells[-1]!r} is not a grade; expected a whole number")
        grades.setdefault(cells[0], {})[cells[-2]] = int(grade)
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
