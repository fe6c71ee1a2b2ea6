"""The one loop of all evaluations: examples go to the LM a few at a time, outcomes to a file as they come.

An interrupted evaluation goes on after the last example whose outcomes were written. What was scored for the example
after it lies in the cache of scores.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from replug.data.progress import Progress
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.examples import Example
from replug.evals.intervals import Transform, identity

EXAMPLES_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one example under one method: the numbers that metrics add up, and what is worth reading."""

    numbers: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


Outcomes = dict[str, Outcome]  # by method


@dataclass(frozen=True, slots=True)
class Metric:
    """A number summed over examples, over the sum of another; the number of examples where there is none."""

    numerator: str
    denominator: str | None = None
    transform: Transform = identity


class Task(Protocol):
    """One evaluation: its examples, its metrics, and how an example is put to the LM."""

    @property
    def examples(self) -> Sequence[Example]: ...

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The first is the one that methods are compared by."""
        ...

    def groups(self, example: Example) -> tuple[str, ...]:
        """What figures are given for besides all examples, such as a domain."""
        ...

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        """Put an example to the LM; what is returned waits for the answer."""
        ...


class OutcomeFile:
    """Outcomes as JSON lines, one for each example, in order; a torn last line is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(_whole_lines(path))

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    whole = path.read_bytes().rpartition(b"\n")[0]
    with path.open("r+b") as file:
        file.truncate(len(whole) + bool(whole))
    for line in whole.splitlines():
        yield json.loads(line)


def run_task(task: Task, book: EvidenceBook, file: OutcomeFile, what: str) -> None:
    """Measure every example that the file does not hold yet."""
    done, total = len(file.rows), len(task.examples)
    progress = Progress(what, total, done)
    pending: dict[int, Callable[[], Outcomes]] = {}
    for row in range(done, total + EXAMPLES_IN_FLIGHT):
        if row < total:
            pending[row] = task.submit(row, book.of(row))
        if (ready := row - EXAMPLES_IN_FLIGHT) in pending:
            file.append(_as_json(task.examples[ready], pending.pop(ready)()))
            progress.advance()


def _as_json(example: Example, outcomes: Outcomes) -> dict[str, Any]:
    return {
        "id": example.id,
        "group": example.group,
        "methods": {name: {"numbers": one.numbers, "detail": one.detail} for name, one in outcomes.items()},
    }
