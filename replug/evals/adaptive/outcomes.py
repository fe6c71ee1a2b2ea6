"""What evaluations left on disk, as arrays: which questions each method answers right, at what cost, by which signals.

A folder is what `replug evaluate` wrote: config.yaml, lm.json, outcomes.jsonl, and results.json once it is finished.
Folders of one LM may bring different methods over the same questions; those of other LMs stand beside them.

Which retriever, over which documents, a method of an evaluation found its evidence by.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import flatten, load_stored_evaluation_config
from replug.config.methods import GENREAD, METHOD, NONE, WITHOUT_RETRIEVER
from replug.data.folder import require_checksums
from replug.data.rows import require_new
from replug.data.shards import prepared_folder
from replug.data.store import Corpus, PreparedSet
from replug.evals.adaptive.protocol import COUNTED, Questions, WayCosts
from replug.evals.folder import EvaluationFolder
from replug.evals.popqa import DOCUMENTS
from replug.evals.search import index_of
from replug.index_workers.local_index import retriever_identity as index_identity
from replug.index_workers.version_store import VersionStore
from replug.models.policy import SIGNALS, KnownFrom
from replug.models.preparing import data_folder

ACCURACY, RECALL = "accuracy", "answer_recall"
POPULARITY, FREQUENCY = "popularity", "frequency"
ADAPTIVE = "adaptive "  # how the policy of two ways is named, before their name
# Keys of `questions` that do not say how a question is asked; which ones are asked is compared by their ids.
FREE = ("questions.path", "questions.max_questions", "questions.latency_questions")


@dataclass(frozen=True, slots=True)
class MethodOutcomes:
    """One method's numbers [N] by name, NaN where a question has none, and the folder that they are from.

    `seconds` are the means of what a latency pass timed, by name.
    """

    numbers: Mapping[str, np.ndarray]
    seconds: Mapping[str, float]
    config: EvaluationConfig
    folder: EvaluationFolder

    @property
    def accuracy(self) -> np.ndarray:
        """0 or 1 for each question, [N]."""
        return self.numbers[ACCURACY]

    def costs(self) -> WayCosts:
        unknown = np.full(len(self.accuracy), np.nan)
        counted = {name: self.numbers.get(name, unknown) for name in COUNTED}
        timed = (self.seconds.get(name, math.nan) for name in ("seconds", "evidence_seconds"))
        return WayCosts(counted, *timed)


@dataclass(frozen=True, slots=True)
class TwoWays:
    """Two ways to answer, by the names of their methods: without retrieval and with it."""

    closed: str
    augmented: str

    @property
    def name(self) -> str:
        """That of the second, where the first is closed book; such as genread + replug@1 of others."""
        return self.augmented if self.closed == NONE else f"{self.closed} + {self.augmented}"

    @property
    def policy_name(self) -> str:
        return f"{ADAPTIVE}{self.name}"


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """What one LM answered to N questions: their ids and relations, and the outcomes by method.

    `popularity_signal` names the signal that the number `popularity` is: `frequency` where the questions tell no page
    views, so that documents were counted instead.
    """

    name: str
    identity: str
    ids: tuple[str, ...]
    relations: tuple[str, ...]
    methods: Mapping[str, MethodOutcomes]
    popularity_signal: str

    def questions(self, pair: TwoWays) -> Questions:
        right = (self.methods[way].accuracy.astype(np.int64) for way in (pair.closed, pair.augmented))
        return Questions(self.relations, *right)

    def signals(self, pair: TwoWays) -> dict[str, np.ndarray]:
        """By name, those that any question has: values [N] in their own unit, NaN where a question has none.

        Documents that were counted are `frequency` alone: a policy by `popularity` would be asked with page views.
        """
        hidden = {POPULARITY} - {self.popularity_signal}
        found = {}
        for name in (name for name in SIGNALS if name not in hidden):
            if name == POPULARITY:
                found[name] = self.of_question(name)
            else:  # a frequency too is of the documents that are searched
                is_closed = SIGNALS[name].known_from is KnownFrom.closed_answer
                found[name] = self.methods[pair.closed if is_closed else pair.augmented].numbers.get(name)
        return {name: values for name, values in found.items() if values is not None and np.isfinite(values).any()}

    def of_question(self, name: str) -> np.ndarray | None:
        """What is the same under every method, [N]; None where no method has it."""
        return next((of.numbers[name] for of in self.methods.values() if name in of.numbers), None)


def read_answered(folders: Sequence[Path]) -> list[AnsweredQuestions]:
    """What is in the folders, by LM in the order given.

    Raises UserError for a folder that is no finished evaluation, for one that asked other questions or asked them in
    another way, and for a method of one LM that two folders answer differently.
    """
    read = [_read(EvaluationFolder(path)) for path in folders]
    if not read:
        raise UserError("no folder is given; expected what `replug evaluate` wrote")
    by_lm: dict[str, AnsweredQuestions] = {}
    for one in read:
        if other := set(read[0].ids) ^ set(one.ids):
            raise UserError(
                f"{_folder(one)} and {_folder(read[0])} are of other questions: only one of them holds {min(other)}; "
                "expected the same in all folders"
            )
        by_lm[one.identity] = _combined(by_lm[one.identity], one) if one.identity in by_lm else one
    return list(by_lm.values())


def _read(folder: EvaluationFolder) -> AnsweredQuestions:
    folder.require_finished()
    require_checksums(
        folder.path, "run the evaluation again", [folder.config.name, folder.lm.name, folder.outcomes.name]
    )
    config = load_stored_evaluation_config(folder.config)
    identity = json.loads(folder.lm.read_text())["identity"]
    if identity is None:
        raise UserError(f"{folder.path}: evaluation={config.evaluation} asked no LM; expected one of questions")
    ids, relations, rows, popularity_signal = _rows(folder.outcomes)
    timed = []
    if folder.latency.is_file():
        timed = [_field(row, "methods", dict, where) for where, row in _lines(folder.latency)]
    methods = {}
    for method in rows[0]:
        names = dict.fromkeys(name for row in rows for name in row[method])
        numbers = {name: np.array([row[method].get(name, np.nan) for row in rows], np.float64) for name in names}
        latencies = [row[method]["numbers"] for row in timed if method in row]
        seconds = {name: float(np.mean([of[name] for of in latencies])) for name in latencies[0]} if latencies else {}
        methods[method] = MethodOutcomes(numbers, seconds, config, folder)
    name = config.lm.model or Path(str(config.lm.path)).name.rpartition(":")[2]
    return AnsweredQuestions(name, identity, ids, relations, methods, popularity_signal)


def _rows(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], list[dict[str, dict[str, float]]], str]:
    """Ids, relations, and numbers by method of every question; and which signal their popularity is."""
    ids: list[str] = []
    relations, rows, seen, popularity_signal = [], [], set[str](), POPULARITY
    for where, row in _lines(path):
        ids.append(str(_field(row, "id", str | int, where)))
        require_new(ids[-1], seen, where)
        relations.append(_field(row, "group", str, where))
        methods = _field(row, "methods", dict, where)
        rows.append({name: _checked(outcome, f"{where}: {name}") for name, outcome in methods.items()})
        details = [outcome.get("detail") for outcome in methods.values()]
        if any(isinstance(detail, dict) and detail.get("popularity_from") == DOCUMENTS for detail in details):
            popularity_signal = FREQUENCY
        if rows[-1].keys() != rows[0].keys():
            raise UserError(f"{where}: methods are {', '.join(rows[-1])}; expected {', '.join(rows[0])}, as before")
    if not rows or not rows[0]:
        raise UserError(f"{path} holds no outcomes")
    return tuple(ids), tuple(relations), rows, popularity_signal


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with where it stands (`file:line`)."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected what `replug evaluate` wrote")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield f"{path}:{number}", json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not valid JSON: run the evaluation again") from error


def _field(row: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    value = row.get(name)
    if not isinstance(value, kind):
        raise UserError(f"{where}: field {name!r} is {value!r}; expected what `replug evaluate` wrote")
    return value


def _checked(outcome: Any, where: str) -> dict[str, float]:
    numbers = outcome.get("numbers") if isinstance(outcome, dict) else None
    if not isinstance(numbers, dict) or not all(isinstance(value, int | float) for value in numbers.values()):
        raise UserError(f"{where}: field 'numbers' is {numbers!r}; expected a number by each name")
    if numbers.get(ACCURACY) not in (0, 1):
        raise UserError(
            f"{where}: accuracy is {numbers.get(ACCURACY)}; expected 0 or 1, as evaluation=popqa writes of each"
        )
    return numbers


def _combined(first: AnsweredQuestions, other: AnsweredQuestions) -> AnsweredQuestions:
    """The methods of both, by the order of the questions in the first."""
    one, two = (flatten(next(iter(of.methods.values())).config) for of in (first, other))
    for key in one:
        if (key == "seed" or key.startswith("questions.")) and key not in FREE and one[key] != two[key]:
            raise UserError(
                f"{key} is {one[key]} in {_folder(first)}, but {two[key]} in {_folder(other)}: expected questions that "
                "were asked in one way"
            )
    place = {name: row for row, name in enumerate(other.ids)}
    order = np.array([place[name] for name in first.ids])
    _require_same_popularity(first, other, order)
    methods = dict(first.methods)
    for name, of in other.methods.items():
        moved = MethodOutcomes({key: of.numbers[key][order] for key in of.numbers}, of.seconds, of.config, of.folder)
        if name in methods and not np.array_equal(methods[name].accuracy, moved.accuracy):
            raise UserError(
                f"{name} answers differently in {of.folder.path} and in {methods[name].folder.path}; expected a method "
                "once for each LM: leave one of the folders out"
            )
        methods.setdefault(name, moved)
    return replace(first, methods=methods)


def _require_same_popularity(first: AnsweredQuestions, other: AnsweredQuestions, order: np.ndarray) -> None:
    """Page views in one folder and documents in another, or documents of two corpora, are no one scale."""
    known, given = first.of_question(POPULARITY), other.of_question(POPULARITY)
    if known is None or given is None or np.array_equal(known, given[order], equal_nan=True):
        return
    row = int(np.flatnonzero(~np.isclose(known, given[order], rtol=0, atol=0, equal_nan=True))[0])
    raise UserError(
        f"the popularity of {first.ids[row]} is {known[row]:g} in {_folder(first)}, but {given[order][row]:g} in "
        f"{_folder(other)}: expected the same questions, and the same documents where these are counted"
    )


def _folder(answered: AnsweredQuestions) -> Path:
    return next(iter(answered.methods.values())).folder.path


def full_name(method: str, k: int) -> str:
    """The method with its number of documents said, such as replug@10."""
    found = METHOD.fullmatch(method)
    assert found is not None, method  # the evaluation has run
    if found["k"] or found["source"] in (NONE, GENREAD):
        return method
    return f"{found['source']}@{k}{method[len(found['source']) :]}"


def retriever_identity(method: str, config: EvaluationConfig, folder: EvaluationFolder) -> str:
    """As `IndexRetriever.identity` is for the same retriever and documents.

    Raises UserError where the index or the documents of the evaluation are gone.
    """
    source = method.partition("@")[0].partition("/")[0]
    if source in (NONE, GENREAD):
        return source
    if source in WITHOUT_RETRIEVER:
        imported, prepared = folder.data / "corpus", data_folder(config.run_config(), folder.data)
        if prepared_folder(imported).is_finished:
            return f"{source}:{Corpus(imported).corpus_sha256[:16]}"
        if not prepared_folder(prepared).is_finished:
            raise UserError(f"the documents are gone from {prepared}: a policy must say which retriever it is for")
        return f"{source}:{PreparedSet(prepared).corpus_sha256[:16]}"
    root = index_of(config, source, folder.found)
    store = VersionStore(root.absolute())
    if not (versions := store.published()):
        raise UserError(f"the index of {method} is gone from {root}: a policy must say which retriever it is for")
    own = config.query_encoders.get(source)
    return index_identity(store.plan(versions[-1]), root) + (f":queries by {own}" if own else "")
