"""Shots for `replug ask`: a user's own file, or a few of ours that show an LM how short an answer is.

    {"question": "Which river flows through Nantes?", "answer": "the Loire", "evidence": "Nantes lies on the Loire."}

Ours have a person, a date, a number and a place as answers, and evidence that holds more than the answer.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replug.answering.prompts import Shot
from replug.config.errors import UserError
from replug.data.rows import read_json_lines

FIELDS = ("question", "answer", "evidence")
OWN_SHOTS = (
    Shot(
        "Which river flows through Nantes?",
        "the Loire",
        "Nantes is a city in the west of France. It lies on the Loire, some 50 km from the Atlantic.",
    ),
    Shot(
        "When was the Rijksmuseum in Amsterdam opened?",
        "1885",
        "The Rijksmuseum was founded in The Hague in 1798. Its present building in Amsterdam, by Pierre Cuypers, was "
        "opened in 1885.",
    ),
    Shot(
        "Who painted The Night Watch?",
        "Rembrandt",
        "The Night Watch is a group portrait of a civic guard. Rembrandt finished it in 1642.",
    ),
    Shot(
        "How many legs does a spider have?",
        "eight",
        "Insects have six legs. Spiders are arachnids: they have eight, and most of them make silk.",
    ),
)


def read_shots(path: Path) -> list[Shot]:
    """Rows of `question`, `answer` and `evidence`, texts all. Raises UserError for others, and for a file of none."""
    shots = [_shot(row, where) for where, row in read_json_lines(path)]
    if not shots:
        raise UserError(f"{path} holds no shots; expected rows of {', '.join(FIELDS)}")
    return shots


def _shot(row: Mapping[str, Any], where: str) -> Shot:
    question, answer, evidence = _texts(row, where)
    return Shot(question, answer, evidence)


def _texts(row: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in FIELDS:
        value = row.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: field {name!r} must be a text, found {value!r}")
        yield value
