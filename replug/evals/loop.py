"""The one loop of all evaluations: examples go to the LM a few at a time, outcomes to a file as they come.

A rerun measures the examples whose ids are not in the file. The LM scores of an unfinished example are in the cache.

outcomes.jsonl     {"id", "group", "source", "methods": {method: {"numbers", "detail"}}} of every example, as it came;
                   no source where none is known
examples.parquet   a row for each example and method: question, references, gold, prompt, documents, weights
                   (`final_weights` after the text), numbers and what the LM said
"""

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import RunError, UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.files import replace_file, writing
from replug.data.progress import Progress
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.intervals import Transform, identity
from replug.models.black_box_lm import AsyncLM
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate

if TYPE_CHECKING:
    from replug.evals.folder import EvaluationFolder
    from replug.evals.results import Results
    from replug.evals.tables import Blocks

log = logging.getLogger(__name__)

Row = dict[str, Any]


class OutcomeFile:
    """Rows as JSON lines, in the order they came. A torn line, which a kill leaves, is removed when the file is opened.

    Raises RunError if the disk does not take a row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        self.rows: list[Row] = []
        whole = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is not None:
                self.rows.append(row)
                whole.append(line)
            elif number < len(lines):  # the last one alone is what a kill leaves
                log.warning(f"{path}:{number} is damaged, and what it says is done again")
        if len(whole) < len(lines):
            replace_file(path, b"".join(whole))

    def append(self, row: Row) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self.rows.append(row)

    def by(self, key: str, known: Collection[str]) -> dict[str, Row]:
        """Return the row of each known value; the first where two processes wrote one.

        Raises UserError for a row of something else.
        """
        rows: dict[str, Row] = {}
        for number, row in enumerate(self.rows, start=1):
            if row.get(key) not in known:
                raise UserError(
                    f"{self.path}:{number} is of {key} {row.get(key)!r}, which is none of this evaluation's: bring its "
                    "texts or questions back, or give another out"
                )
            rows.setdefault(row[key], row)
        return rows


def outcomes_of(folder: Path, measured: str) -> OutcomeFile:
    """Open the outcomes of a measurement in a folder; those of any other measurement are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / "outcomes.jsonl", folder / "measured.json"
    if not mark.is_file() or mark.read_text() != measured:
        path.unlink(missing_ok=True)
        replace_file(mark, measured.encode())
    return OutcomeFile(path)


def write_examples(path: Path, rows: Sequence[Row], book: EvidenceBook, task: "Task") -> None:
    """Write as Parquet what was asked, what is right, what the LM read, and what it said."""
    written: list[Row] = []
    for place, (row, example) in enumerate(zip(rows, task.examples, strict=True)):
        of = book.of(place)
        for method, outcome in row["methods"].items():
            written.append(
                {
                    "id": row["id"],
                    "group": row["group"],
                    "method": method,
                    "question": example.query,
                    "gold": list(example.gold),
                    **task.shown(place, method, of[method]),
                    "documents": book.ids(of[method].doc_rows),
                    "weights": of[method].weights.tolist(),
                    **outcome["numbers"],
                    **outcome["detail"],
                }
            )
    # A column for every name, null where a row has no such number: Arrow would take those of the first row alone.
    names, partial = dict.fromkeys(name for row in written for name in row), path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(pa.table({name: [row.get(name) for row in written] for name in names}), partial)
        partial.replace(path)


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


@dataclass(frozen=True, slots=True)
class PromptedLM:
    """The LM that is asked, behind its cache, and how texts are put to it.

    `source` is where the LM comes from. `reranker` is `rerank_lm`, where another LM is to say how good answers are.
    `num_in_flight` examples are put to the LM before the first is waited for.
    """

    lm: AsyncLM
    template: PromptTemplate
    source: LMSource | None = None
    reranker: "PromptedLM | None" = None
    num_in_flight: int = EXAMPLES_IN_FLIGHT


class Task:
    """One evaluation: what it needs of a configuration, its examples and metrics, and how the LM is asked.

    `of` reads what is measured. Documents are retrieved for `queries`, one for each example or demonstration, empty
    where nothing can be retrieved; `open` gives the task what was found, and the LM. Then examples are submitted.

    Methods are compared by the first metric; a task that `compares_all` also compares each with the first method by
    every metric. One that `asks_twice` asks more when the first answer is there: waiting for that returns what waits
    for the rest.
    """

    reads: ClassVar[tuple[str, ...]] = ()  # keys, or whole sections, beside those of all evaluations
    asks_lm = True
    asks_twice = False
    compares_all = False
    examples: Sequence[Item]
    metrics: Mapping[str, Metric]

    queries: Sequence[str] = ()
    asked: Sequence[str] = ()  # for each query the question that an LM may write a document for
    sources: Sequence[str | None] = ()  # for each query the source whose documents it must not find
    predicted: Sequence[str] = ()  # texts that an LM is to predict
    cut: Callable[[str], str] = staticmethod(str)  # shortens documents before the LM reads them

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterable[str]:
        """Return what a configuration lacks for this evaluation alone, found before anything starts."""
        return ()

    @classmethod
    def searches(cls, config: EvaluationConfig) -> Sequence[Method]:
        """Return what is found for every example beside the methods."""
        return ()

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        """Read what is measured; `corpus` is None where no method retrieves, and `source` where no LM is asked."""
        raise NotImplementedError

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        """Take the LM and the evidence of every query."""
        self.book = book

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Any]:
        """Put an example to the LM, and return what waits for its `Outcomes`."""
        raise NotImplementedError

    def groups(self, row: int) -> tuple[str, ...]:
        """Return what figures are given for besides all examples, such as a domain."""
        return (self.examples[row].group,)

    def stratum(self, row: int) -> str:
        """Return what the example was chosen from, where so many were chosen of each, such as a subject."""
        return ""

    def compared(self, row: int) -> tuple[str, ...]:
        """Return the texts that no document should hold: what is predicted or asked, and its answers."""
        return (self.examples[row].query,)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        """Return `references`, the answers that are accepted, and `prompt`, the one with the nearest document."""
        return {}

    def settle(self, rows: Sequence[Row], folder: "EvaluationFolder") -> Sequence[Row]:
        """Return the rows that results are made of; keep their examples alone, where others only serve to fit."""
        return rows

    def findings(self, rows: Sequence[Row], results: "Results", folder: "EvaluationFolder") -> "Blocks":
        """Add to the results what is more than metrics by method, and return more blocks of the table."""
        return ()


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
