"""How many examples an evaluation measures: as its files tell, else as its keys or the command line do."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import read_json
from replug.data.rows import count_rows, read_json_array
from replug.planning.readings import OPENINGS

TEXTS = ("lm", "tokens")


def count_examples(config: EvaluationConfig, given: int | None) -> int:
    """`given` is what the command line says, and comes first. Raises UserError where nothing tells."""
    if given is not None:
        return given
    found = _of_texts(config) if config.evaluation in TEXTS else _of_questions(config)
    if found is None:
        what = "texts.max_windows" if config.evaluation in TEXTS else "questions.max_questions"
        raise UserError(f"{what} is not set and no file is there to count; expected --examples N, such as 3610")
    return found


def with_lengths_of_set(config: EvaluationConfig) -> EvaluationConfig:
    """With the lengths that `data.prepared` was cut to, where that set is there and was cut from texts."""
    manifest = _manifest(config)
    origin = manifest["origin"] if manifest else {}
    if "data.window" not in origin:
        return config
    lengths = {"window": origin["data.window"], "document_tokens": origin["data.document_tokens"]}
    return replace(config, data=replace(config.data, **lengths))


def _manifest(config: EvaluationConfig) -> dict[str, Any] | None:
    path = Path(config.data.prepared).expanduser() / "manifest.json" if config.data.prepared else None
    return read_json(path, "prepare the set again") if path is not None and path.is_file() else None


def _of_texts(config: EvaluationConfig) -> int | None:
    """Whole texts are not cut here: as many spans as are asked for."""
    most = config.texts.max_windows
    if config.texts.path:
        return most
    there = _heldout(config)
    return there if most is None else min(most, there)


def _heldout(config: EvaluationConfig) -> int:
    data = config.data
    if data.heldout and Path(data.heldout).expanduser().is_file():
        return count_rows(Path(data.heldout).expanduser())
    manifest = _manifest(config)
    return int(manifest["counts"]["heldout"]) if manifest else data.num_heldout


def _of_questions(config: EvaluationConfig) -> int | None:
    keys, is_mmlu = config.questions, config.evaluation == "mmlu"
    path = Path(keys.path).expanduser() if keys.path else None
    if path is None or not path.exists():
        return None if keys.max_questions is None else keys.max_questions * (OPENINGS["mmlu"] if is_mmlu else 1)
    counts = [_rows(file) for file in _files(path, is_mmlu)]
    most = keys.max_questions
    if is_mmlu:  # so many of each subject
        return sum(counts if most is None else (min(count, most) for count in counts))
    return sum(counts) if most is None else min(most, sum(counts))


def _files(path: Path, is_mmlu: bool) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted((path / "test").glob("*_test.csv") if is_mmlu else path.glob("*.json"))


def _rows(file: Path) -> int:
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = [row for row in csv.reader(lines) if row]
        return len(rows) - (bool(rows) and rows[0][-1].strip().lower() == "answer")
    return sum(1 for _ in read_json_array(file)) if file.suffix == ".json" else count_rows(file)
