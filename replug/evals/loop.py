"""The one loop of all evaluations: examples go to the LM a few at a time, outcomes to a file as they come.

A rerun measures the examples whose ids are not in the file. The LM scores of an unfinished example are in the cache.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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


EXAMPLES_IN_FLIGHT = 8  # for each replica of the LM
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one example under one method: the numbers that metrics add up, and details for readers."""

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


class Task:
    """One evaluation: its examples, its metrics, and how an example is put to the LM.

    Methods are compared by the first metric; a task that `compares_all` also compares each with the first method by
    every metric. A task that only compares what was measured before has no `submit`. One that `asks_twice` asks more
    when the first answer is there: waiting for that returns what waits for the rest.
    """

    examples: Sequence[Item]
    metrics: Mapping[str, Metric]
    asks_twice = False
    compares_all = False

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Any]:
        """Put an example to the LM, and return what waits for its `Outcomes`."""
        raise NotImplementedError

    def groups(self, example: Item) -> tuple[str, ...]:
        """Return what figures are given for besides all examples, such as a domain."""
        return (example.group,)

    def stratum(self, example: Item) -> str:
        """Return what the example was chosen from, where so many were chosen of each, such as a subject."""
        return ""

    def compared(self, row: int) -> tuple[str, ...]:
        """Return the texts that no document should hold: what is predicted or asked, and its answers."""
        return (self.examples[row].query,)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        """Return `references`, the answers that are accepted, and `prompt`, the one with the nearest document."""
        return {}


def outcome_rows(
    task: Task, book: EvidenceBook, rows: Sequence[int] | None = None, num_in_flight: int = EXAMPLES_IN_FLIGHT
) -> Iterator[Row]:
    """Measure the examples of these numbers, all by default, some at a time; they come in that order.

    What the LM is asked, and in which order by each stage of a task, does not depend on how many are in flight.
    """
    numbers = range(len(task.examples)) if rows is None else rows
    waiting = in_order((task.submit(row, book.of(row)) for row in numbers), num_in_flight)
    for row, outcomes in zip(numbers, in_order(waiting, num_in_flight) if task.asks_twice else waiting, strict=True):
        example = task.examples[row]
        yield {
            "id": example.id,
            "group": example.group,
            **({"source": example.source} if example.source else {}),
            "methods": {name: {"numbers": one.numbers, "detail": one.detail} for name, one in outcomes.items()},
        }


def in_order(begun: Iterable[Callable[[], Result]], num_in_flight: int = EXAMPLES_IN_FLIGHT) -> Iterator[Result]:
    """Wait for calls in their order while the next ones are under way: taking one from `begun` begins it."""
    in_flight: deque[Callable[[], Result]] = deque()
    for finish in begun:
        in_flight.append(finish)
        if len(in_flight) > num_in_flight:
            yield in_flight.popleft()()
    while in_flight:
        yield in_flight.popleft()()


def run_task(
    task: Task, book: EvidenceBook, file: OutcomeFile, what: str, num_in_flight: int = EXAMPLES_IN_FLIGHT
) -> list[Row]:
    """Return the outcomes of every example in order; those that the file does not hold yet are measured.

    Raises UserError where two examples have one id, or the file holds another's.
    """
    ids = [example.id for example in task.examples]
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"two examples have the id {twice[0]!r} ({len(twice)} such ids); expected one for each")
    known = file.by("id", set(ids))
    missing = [row for row, name in enumerate(ids) if name not in known]
    progress = Progress(what, len(ids), len(known))
    for row in outcome_rows(task, book, missing, num_in_flight):
        file.append(row)
        known[row["id"]] = row
        progress.advance()
    return [known[name] for name in ids]
