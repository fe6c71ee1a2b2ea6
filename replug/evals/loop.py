"""The one loop of all evaluations: examples go to the LM a few at a time, outcomes to a file as they come.

An interrupted evaluation goes on with the examples whose outcomes are not in the file, by their ids. The scores of one
of them lie in the cache of scores.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from replug.config.errors import UserError
from replug.data.progress import Progress
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.intervals import Transform, identity
from replug.evals.outcomes import OutcomeFile, Row


@dataclass(frozen=True, slots=True)
class Item:
    """One item of an evaluation set.

    Documents are retrieved for `query`. `group` is the domain or subject that figures are given by. `gold` are ids of
    documents known to be right; they only ever measure. `source` names the text it was cut from, where there is one.
    """

    id: str
    query: str
    group: str
    gold: tuple[str, ...] = ()
    source: str | None = None


EXAMPLES_IN_FLIGHT = 8
Found = TypeVar("Found")


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
    def examples(self) -> Sequence[Item]: ...

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The first is the one that methods are compared by."""
        ...

    def groups(self, example: Item) -> tuple[str, ...]:
        """What figures are given for besides all examples, such as a domain."""
        ...


class Task(Measured, Protocol):
    """One evaluation: its examples, its metrics, and how an example is put to the LM."""

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        """Put an example to the LM; what is returned waits for the answer."""
        ...


@runtime_checkable
class StratifiedTask(Protocol):
    """A task whose examples were chosen from strata, so many of each, such as subjects."""

    def stratum(self, example: Item) -> str: ...


@runtime_checkable
class ComparedTask(Protocol):
    """A task that says which texts of an example no document should hold; else that is what is retrieved for."""

    def compared(self, row: int) -> tuple[str, ...]:
        """What is predicted or asked, and its answers."""
        ...


@runtime_checkable
class ShownTask(Protocol):
    """A task that says what was put to the LM, for who reads its examples."""

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        """`references`, the answers that are accepted, and `prompt`, the one with the nearest document."""
        ...


def outcome_rows(task: Task, book: EvidenceBook, rows: Sequence[int] | None = None) -> Iterator[Row]:
    """Measure the examples of these numbers, all by default, some at a time; they come in that order."""

    def begin(row: int) -> Callable[[], Row]:
        example, finish = task.examples[row], task.submit(row, book.of(row))
        return lambda: {
            "id": example.id,
            "group": example.group,
            **({"source": example.source} if example.source else {}),
            "methods": {name: {"numbers": one.numbers, "detail": one.detail} for name, one in finish().items()},
        }

    return in_order(map(begin, range(len(task.examples)) if rows is None else rows))


def in_order(begun: Iterable[Callable[[], Found]]) -> Iterator[Found]:
    """Wait for calls in their order while the next ones are under way: taking one from `begun` begins it."""
    in_flight: deque[Callable[[], Found]] = deque()
    for finish in begun:
        in_flight.append(finish)
        if len(in_flight) > EXAMPLES_IN_FLIGHT:
            yield in_flight.popleft()()
    while in_flight:
        yield in_flight.popleft()()


def run_task(task: Task, book: EvidenceBook, file: OutcomeFile, what: str) -> list[Row]:
    """The outcomes of every example, in the examples' order; those that the file does not hold yet are measured.

    Raises UserError where two examples have one id, or the file holds another's.
    """
    ids = [example.id for example in task.examples]
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"two examples have the id {twice[0]!r} ({len(twice)} such ids); expected one for each")
    known = file.by("id", set(ids))
    missing = [row for row, name in enumerate(ids) if name not in known]
    progress = Progress(what, len(ids), len(known))
    for row in outcome_rows(task, book, missing):
        file.append(row)
        known[row["id"]] = row
        progress.advance()
    return [known[name] for name in ids]
