"""Where raw texts come from: JSONL, a folder of text files, a Hugging Face dataset, or the shipped ones.

A source yields `SourceText`s: whole texts with an id and a domain, in a fixed order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data.rows import read_json_lines, require_new


@dataclass(frozen=True, slots=True)
class SourceText:
    """One whole text before it is cut."""

    id: str
    text: str
    domain: str


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Which fields of a raw row hold what; dots reach into nested fields (`meta.pile_set_name`)."""

    text: str = "text"
    id: str = "id"
    domain: str = "domain"


def read_source(source: str, fields: FieldMap) -> Iterator[SourceText]:
    """The texts of a `data.source`: a path, `package:NAME`, `stand_in`, or a dataset on the hub."""
    if source == "stand_in":
        from data.stand_in_texts import stand_in_texts

        return stand_in_texts()
    if source.startswith("package:"):
        from data.package_texts import read_package_texts

        return read_package_texts(source.removeprefix("package:"))
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_rows(path, fields)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in (".jsonl", ".gz"):
        raise UserError(f"data.source: {source} does not exist; expected a JSONL file, a folder or a dataset's name")
    return _read_hub(source, fields)


def _read_folder(root: Path) -> Iterator[SourceText]:
    """Every text file under a folder; the first folder below it is the domain."""
    found = False
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        relative = path.relative_to(root)
        if any(part.startswith(".") for part in relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert or remove the file") from error
        found = True
        yield SourceText(str(relative), text, relative.parts[0] if len(relative.parts) > 1 else "all")
    if not found:
        raise UserError(f"data.source: the folder {root} holds no files")


def _read_rows(path: Path, fields: FieldMap) -> Iterator[SourceText]:
    seen: set[str] = set()
    for number, (where, row) in enumerate(read_json_lines(path)):
        text = _source_text(row, fields, where, number)
        require_new(text.id, seen, where)
        yield text
    if not seen:
        raise UserError(f"data.source: {path} holds no texts")


def _read_hub(name: str, fields: FieldMap) -> Iterator[SourceText]:
    """Streams the train split of a dataset (the Pile: monology/pile-uncopyrighted, meta.pile_set_name)."""
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"data.source: cannot open the dataset {name}: {str(error).strip().splitlines()[0]}") from error
    for number, row in enumerate(rows):
        yield _source_text(row, fields, f"{name}:{number}", number)


def _source_text(row: dict[str, Any], fields: FieldMap, where: str, number: int) -> SourceText:
    text = _nested(row, fields.text)
    if not isinstance(text, str):
        raise UserError(f"{where}: field '{fields.text}' must be a string (data.text_field); found {', '.join(row)}")
    identifier = _nested(row, fields.id)
    return SourceText(
        id=str(number if identifier is None else identifier),
        text=text,
        domain=str(_nested(row, fields.domain) or "all"),
    )


def _nested(row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
