"""The one loop of all evaluations: examples go to the LM a few at a time, outcomes to a file as they come.

An interrupted evaluation goes on after the last example whose outcomes were written. What was scored for the example
after it lies in the cache of scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from replug.data.progress import Progress
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.examples import Example
from replug.evals.intervals import Transform, identity
from replug.evals.outcomes import OutcomeFile, Row

EXAMPLES_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one example under one method: the numbers that metrics add up, and what is worth reading."""

    numbers: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


Outcomes = dict[str, Outcome]  # by method


@dataclass(frozen=True, slots=True)
class Metric:
    """A number summed over examples, over the sum of another; the number of examples where there is none.

    One that `may_be_unknown` is left out of a method's results where some example does not tell the number.
    """

    numerator: str
    denominator: str | None = None
    transform: Transform = identity
    may_be_unknown: bool = False


class Measured(Protocol):
    """What outcomes are of: examples, and the metrics that compare methods on them."""

    @property
    def examples(self) -> Sequence[Example]: ...

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The first is the one that methods are compared by."""
        ...

    def groups(self, example: Example) -> tuple[str, ...]:
        """What figures are given for besides all examples, such as a domain."""
        ...


class Task(Measured, Protocol):
    """One evaluation: its examples, its metrics, and how an example is put to the LM."""

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        """Put an example to the LM; what is returned waits for the answer."""
        ...


def outcome_rows(task: Task, book: EvidenceBook, start: int = 0) -> Iterator[Row]:
    """Measure every example from `start` on, some at a time; rows come in order."""
    total = len(task.examples)
    pending: dict[int, Callable[[], Outcomes]] = {}
    for row in range(start, total + EXAMPLES_IN_FLIGHT):
        if row < total:
            pending[row] = task.submit(row, book.of(row))
        if (ready := row - EXAMPLES_IN_FLIGHT) in pending:
            yield _as_json(task.examples[ready], pending.pop(ready)())


def run_task(task: Task, book: EvidenceBook, file: OutcomeFile, what: str) -> None:
    """Measure every example that the file does not hold yet."""
    progress = Progress(what, len(task.examples), len(file.rows))
    for row in outcome_rows(task, book, len(file.rows)):
        file.append(row)
        progress.advance()


def _as_json(example: Example, outcomes: Outcomes) -> Row:
    return {
        "id": example.id,
        "group": example.group,
        "methods": {name: {"numbers": one.numbers, "detail": one.detail} for name, one in outcomes.items()},
    }
