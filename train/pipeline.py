"""Batches retrieved and scored ahead of the step that trains on them.

At the boundary before step t the queries of step t + depth are encoded with the weights as they are. Then, while
step t trains, a thread searches the index that was live at that boundary, and hands the documents to the LM. So
what a batch saw follows from its step and the depth, never from timing. Depth 0 is the strictly sequential method.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from replug.cluster.interruption import wait_for
from replug.configs.errors import RunError
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.data.sampler import QuerySampler
from replug.data.store import CorpusStore, WindowStore
from replug.index_workers.rerank import Search
from replug.index_workers.version_store import IndexState
from replug.models.black_box_lm import ScoreSum
from replug.models.prompt import PromptTemplate
from replug.train.step_clock import StepClock


class ScoreError(RunError):
    """The LM's answer cannot be trained on; the message names the text and the document."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A batch whose documents are known, and what the LM will say: [B * K], the documents of one query in a row."""

    retrieved: RetrievedBatch
    scores: "Future[list[ScoreSum]]"


@dataclass(frozen=True, slots=True)
class RetrievalStage:
    """How documents are found: `encode` maps texts to vectors [B, D] by the live weights, `executor` runs `search`."""

    encode: Callable[[Sequence[str]], np.ndarray]
    search: Search
    executor: Executor
    k: int
    exclude_own_source: bool = False


@dataclass(frozen=True, slots=True)
class ScoringStage:
    """How texts are put to the LM: `score` takes prefixes and continuations."""

    score: Callable[[Sequence[str], Sequence[str]], "Future[list[ScoreSum]]"]
    template: PromptTemplate


@dataclass(frozen=True, slots=True)
class Horizon:
    """How many batches are ahead of the step that trains, and the step after which there is none."""

    depth: int
    max_steps: int


class TrainingTexts(Protocol):
    """Where queries and documents are read."""

    queries: WindowStore
    corpus: CorpusStore


class BatchPipeline:
    """Keeps `horizon.depth` batches in flight, and no more: so the LM's pool never has more than that to do.

    `check` is called while a step waits, to raise what should end the wait.
    """

    def __init__(
        self,
        sampler: QuerySampler,
        data: TrainingTexts,
        retrieval: RetrievalStage,
        scoring: ScoringStage,
        horizon: Horizon,
        clock: StepClock,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._sampler, self._queries, self._corpus = sampler, data.queries, data.corpus
        self._retrieval, self._scoring, self._horizon = retrieval, scoring, horizon
        self._clock, self._check_run = clock, check
        self.pairs_per_step = sampler.batch_size * retrieval.k
        self._in_flight: dict[int, Future[_Submitted]] = {}

    def advance(self, step: int, index: IndexState) -> None:
        """At the boundary before `step`: put into flight all that should be by now."""
        with self._clock.measure("retrieve"):
            for ahead in range(step, min(step + self._horizon.depth, self._horizon.max_steps - 1) + 1):
                if ahead not in self._in_flight:
                    self._in_flight[ahead] = self._begin(ahead, step, index)

    def take(self, step: int) -> ScoredBatch:
        """The scored batch of a step, waiting for the LM where it is late."""
        scored = self._result(step)
        del self._in_flight[step]
        return scored

    def peek(self, step: int) -> ScoredBatch:
        """As `take`, but the batch stays in flight."""
        return self._result(step)

    def settle(self) -> None:
        """Wait for the searches under way; the index may free their version after."""
        for step in sorted(self._in_flight):
            wait_for(self._in_flight[step], self._check_run)

    def state(self) -> list[RetrievedBatch]:
        """What a resumed run cannot compute again: documents found by weights that are gone."""
        return [self._in_flight[step].result().retrieved for step in sorted(self._in_flight)]

    def restore(self, batches: Sequence[RetrievedBatch]) -> None:
        """Put the batches of a checkpoint into flight again; the LM scores them anew, or from its cache."""
        self._in_flight = {batch.step: self._retrieval.executor.submit(self._submit, batch) for batch in batches}

    def _begin(self, step: int, query_step: int, index: IndexState) -> "Future[_Submitted]":
        rows = self._sampler.rows(step)
        windows = self._queries.windows(rows)
        vectors = self._retrieval.encode([window.context for window in windows])
        exclude = [window.source for window in windows] if self._retrieval.exclude_own_source else None
        return self._retrieval.executor.submit(self._retrieve, step, query_step, index, rows, vectors, exclude)

    def _retrieve(
        self,
        step: int,
        query_step: int,
        index: IndexState,
        rows: np.ndarray,
        vectors: np.ndarray,
        exclude: Sequence[str | None] | None,
    ) -> _Submitted:
        with self._clock.measure("search"):
            found = self._retrieval.search(index.version, vectors, self._retrieval.k, exclude)
        seen = (step, query_step, found.index_version, index.step)
        return self._submit(RetrievedBatch(*seen, rows, found.doc_rows, found.similarities))

    def _submit(self, batch: RetrievedBatch) -> _Submitted:
        """One call for the whole batch, so that the pool can put pairs of similar length together."""
        prefixes, continuations = [], []
        for window, doc_rows in zip(self._queries.windows(batch.query_rows), batch.doc_rows, strict=True):
            for text in self._corpus.texts(doc_rows):
                prefixes.append(self._scoring.template.prefix(text, window.context, window.continuation))
                continuations.append(window.continuation)
        return _Submitted(batch, self._scoring.score(prefixes, continuations))

    def _result(self, step: int) -> ScoredBatch:
        with self._clock.measure("wait_scores"):
            submitted = wait_for(self._in_flight[step], self._check_run)
            scores = wait_for(submitted.scores, self._check_run)
        shape = submitted.retrieved.doc_rows.shape
        sums = np.array([score.sum_logprob for score in scores]).reshape(shape)
        counts = np.array([score.num_tokens for score in scores]).reshape(shape)[:, 0]
        self._check(submitted.retrieved, sums)
        return ScoredBatch(submitted.retrieved, sums, counts)

    def _check(self, batch: RetrievedBatch, sums: np.ndarray) -> None:
        bad = np.argwhere(~np.isfinite(sums))
        if len(bad):
            query, doc = bad[0]
            window = self._queries.windows(batch.query_rows[[query]])[0]
            document = self._corpus.documents(batch.doc_rows[query, [doc]])[0]
            raise ScoreError(
                f"the LM's score of text {window.id} after document {document.id} is {sums[query, doc]}; "
                f"expected a finite number (step {batch.step})"
            )
