"""The common loop of all evaluations: a few examples at a time go to the LM, outcomes go to a file at once.

A rerun measures only examples with ids missing from the file. The LM scores of an unfinished example are in the cache.

outcomes.jsonl     {"id", "group", "source", "methods": {method: {"numbers", "detail"}}} of every example, in order of
                   writing; without "source" if it is unknown
examples.parquet   a row for each example and method: question, references, gold, prompt, documents, weights
                   (`final_weights` after the text), numbers and the LM's output
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import UserError
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

Row = dict[str, Any]


class OutcomeFile:
    """Rows as JSON lines, in order of writing. Opening the file removes the incomplete line of a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            replace_file(path, whole)
        self.rows: list[Row] = [json.loads(line) for line in whole.splitlines()]

    def append(self, row: Row) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        self.rows.append(row)


def outcomes_of(folder: Path, measured: str) -> OutcomeFile:
    """Open the outcomes of a measurement in a folder; outcomes of any other measurement are deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / "outcomes.jsonl", folder / "measured.json"
    if not mark.is_file() or mark.read_text() != measured:
        path.unlink(missing_ok=True)
        replace_file(mark, measured.encode())
    return OutcomeFile(path)


def write_examples(path: Path, rows: Sequence[Row], book: EvidenceBook, task: "Task") -> None:
    """Write examples.parquet: questions, references, prompts with documents, and outcomes."""
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
    # Name all columns, null for missing values: Arrow would take the names of the first row only.
    names, partial = dict.fromkeys(name for row in written for name in row), path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(pa.table({name: [row.get(name) for row in written] for name in names}), partial)
        partial.replace(path)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of an evaluation set.

    Documents are retrieved for `query`. `group` is the domain or subject for results by group. `gold` are the ids of
    relevant documents, only for measuring. `source` is the text that it was cut from, None if unknown.
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
    """The outcome of one example under one method: the numbers summed by metrics, and details for readers."""

    numbers: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


Outcomes = dict[str, Outcome]  # by method


@dataclass(frozen=True, slots=True)
class Metric:
    """The sum of a number over examples, divided by the sum of another, by default by the number of examples.

    A metric that `may_be_unknown` is left out of a method's results if an example lacks the number.
    """

    numerator: str
    denominator: str | None = None
    transform: Transform = identity
    may_be_unknown: bool = False


@dataclass(frozen=True, slots=True)
class PromptedLM:
    """The LM behind its cache, with its prompt template.

    `source` describes the origin of the LM. `reranker` is the separate `rerank_lm`, None if the LM itself reranks.
    `num_in_flight` is the number of examples submitted before waiting for the first.
    """

    lm: AsyncLM
    template: PromptTemplate
    source: LMSource | None = None
    reranker: "PromptedLM | None" = None
    num_in_flight: int = EXAMPLES_IN_FLIGHT


class Task:
    """An evaluation: its keys of the configuration, its examples and metrics, and its requests to the LM.

    `of` reads the examples. Documents are retrieved for `queries`, one for each example or demonstration (blank: no
    retrieval); `open` gives the task the evidence and the LM. Then examples are submitted.

    Methods are compared by the first metric; with `compares_all` also each method with the first one by every metric.
    With `asks_twice` an example needs two rounds of requests: its first wait returns the function that waits for the
    second round.
    """

    reads: ClassVar[tuple[str, ...]] = ()  # keys or sections, in addition to the shared ones
    asks_lm = True
    asks_twice = False
    compares_all = False
    examples: Sequence[Item]
    metrics: Mapping[str, Metric]

    queries: Sequence[str] = ()
    asked: Sequence[str] = ()  # the question of each query, for documents written by the LM
    sources: Sequence[str | None] = ()  # the excluded source of each query
    predicted: Sequence[str] = ()  # texts for the LM to predict
    cut: Callable[[str], str] = staticmethod(str)  # shortens documents before the LM reads them

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterable[str]:
        """Return the problems of a configuration specific to this kind, before anything starts."""
        return ()

    @classmethod
    def searches(cls, config: EvaluationConfig) -> Sequence[Method]:
        """Return searches for every example in addition to the methods."""
        return ()

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        """Read the examples; `corpus` is None if no method retrieves, `source` is None without an LM."""
        raise NotImplementedError

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        """Take the LM and the evidence of every query."""
        self.book = book

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Any]:
        """Submit an example to the LM, and return a function that waits for its `Outcomes`."""
        raise NotImplementedError

    def groups(self, row: int) -> tuple[str, ...]:
        """Return the groups of an example for results by group, such as its domain."""
        return (self.examples[row].group,)

    def stratum(self, row: int) -> str:
        """Return the stratum of an example, such as its subject, if each has a fixed number of examples."""
        return ""

    def compared(self, row: int) -> tuple[str, ...]:
        """Return the texts that no document should hold: the continuation or question, and its answers."""
        return (self.examples[row].query,)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        """Return `references`, the accepted answers, and `prompt`, with the nearest document."""
        return {}

    def settle(self, rows: Sequence[Row], folder: "EvaluationFolder") -> Sequence[Row]:
        """Return the rows for the results, and keep only their examples; other rows may serve for fitting."""
        return rows

    def findings(self, rows: Sequence[Row], results: "Results", folder: "EvaluationFolder") -> "Blocks":
        """Add further entries to the results, and return further blocks of the table."""
        return ()


def outcome_rows(
    task: Task, book: EvidenceBook, rows: Sequence[int] | None = None, num_in_flight: int = EXAMPLES_IN_FLIGHT
) -> Iterator[Row]:
    """Measure the examples of these rows, by default all, some at a time; yield their outcomes in order.

    The requests to the LM and their order within each stage of a task do not depend on `num_in_flight`.
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
    """Yield results in order while later calls run: taking a call from `begun` starts it."""
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
    """Return the outcomes of every example in order, measuring examples missing from the file.

    Raises UserError if two examples have the same id, or the file has a row of an unknown one.
    """
    ids = [example.id for example in task.examples]
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"two examples have the id {twice[0]!r} ({len(twice)} such ids); expected one for each")
    known = {row["id"]: row for row in file.rows}
    if unknown := known.keys() - set(ids):
        raise UserError(
            f"{file.path} has an example {min(unknown)!r}, which is none of this evaluation's: restore its texts or "
            "questions, or give another out"
        )
    missing = [row for row, name in enumerate(ids) if name not in known]
    progress = Progress(what, len(ids), len(known))
    for row in outcome_rows(task, book, missing, num_in_flight):
        file.append(row)
        known[row["id"]] = row
        progress.advance()
    return [known[name] for name in ids]
