"""Batches retrieved and scored ahead of the step that trains on them.

At the boundary before step t the queries of step t + depth are encoded with the weights as they are. Then, while
step t trains, a thread searches the index that was live at that boundary, and hands the documents to the LM. So the
index and weights behind a batch depend on its step and the depth, never on timing. Depth 0 is strictly sequential.

`score_in_calls` scores a whole set of examples, for labels and development texts.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

import numpy as np

from replug.cluster.interruption import LOOK_SECONDS, wait_for
from replug.config.errors import RunError
from replug.config.schema import RetrieveConfig, TrainConfig
from replug.data.records import Example, RetrievedBatch, ScoredBatch, SearchResult
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.models.encoder import require_finite_vectors
from replug.models.prompt import PromptTemplate
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)


# For searches under way at the end of a run: after a signal, the whole process has half a minute.
SEARCH_SECONDS_AT_THE_END = 8.0

EXAMPLES_PER_CALL = 16

# The k nearest documents to query vectors [B, D] in one version, none of a query's excluded source.
Search = Callable[[int, np.ndarray, int, Sequence[str | None] | None], SearchResult]
Scores = Future[np.ndarray]  # sums of log-probs and numbers of tokens [B * K, 2], a query's documents in a row

_InFlight = tuple[Future[RetrievedBatch], Future[Scores]]  # the documents of a batch, and then their scores


class BatchPipeline:
    """Keeps `depth` batches in flight, which bounds the work of the LM's pool.

    `encode` maps texts to vectors [B, D] by the live weights, `executor` runs `search` for documents of each, and
    `score` takes examples and the texts before each. `check` is called while a step waits; it may raise to end the
    wait.
    """

    def __init__(
        self,
        sampler: QuerySampler,
        data: PreparedSet,
        retrieve: RetrieveConfig,
        train: TrainConfig,
        *,
        encode: Callable[[Sequence[str]], np.ndarray],
        search: Search,
        executor: Executor,
        score: Callable[[Sequence[Example], list[list[str]]], Scores],
        clock: StepClock,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._sampler, self._queries, self._corpus = sampler, data.queries, data.corpus
        self._retrieve, self._train = retrieve, train
        self._encode, self._search, self._executor, self._score = encode, search, executor, score
        self._clock, self._check_run = clock, check
        self._in_flight: dict[int, _InFlight] = {}
        self._last_search: Future[RetrievedBatch] | None = None

    def advance(self, step: int, index: IndexState) -> None:
        """Start all batches that are due at the boundary before `step`."""
        with self._clock.measure("retrieve"):
            for ahead in range(step, min(step + self._train.pipeline_depth + 1, self._train.max_steps)):
                if ahead not in self._in_flight:
                    self._in_flight[ahead] = self._begin(ahead, step, index)

    def take(self, step: int) -> ScoredBatch:
        """Return the scored batch of a step, waiting for the LM if it is late; a failed one stays in flight."""
        search, asked = self._in_flight[step]
        with self._clock.measure("wait_scores"):
            retrieved = wait_for(search, self._check_run)
            scores = wait_for(wait_for(asked, self._check_run), self._check_run)
        shape = retrieved.doc_rows.shape
        sums = scores[:, 0].reshape(shape)
        counts = scores[:, 1].astype(np.int64).reshape(shape)[:, 0]
        bad = np.argwhere(~np.isfinite(sums))
        if len(bad):
            query, doc = bad[0]
            example = self._queries.examples(retrieved.query_rows[[query]])[0]
            document = self._corpus.documents(retrieved.doc_rows[query, [doc]])[0]
            raise RunError(
                f"the LM's score of text {example.id} after document {document.id} is {sums[query, doc]}; "
                f"expected a finite number (step {step})"
            )
        del self._in_flight[step]
        return ScoredBatch(retrieved, sums, counts)

    def settle(self) -> None:
        """Wait until the searches under way have ended, so that the index may free their version.

        A failed search raises when its batch is taken. An error of `check` ends the wait.
        """
        while self._searching(LOOK_SECONDS):
            self._check_run()

    def state(self) -> list[RetrievedBatch]:
        """Return the retrieved batches in flight, which a resumed run cannot retrieve again without the old weights.

        A batch is left out if its search failed, or hangs while the run ends. The resumed run searches for it with
        newer weights, as its `query_step` shows.
        """
        try:
            self.settle()
        except RuntimeError:  # the next boundary raises the same error
            self._searching(SEARCH_SECONDS_AT_THE_END)  # bounded: a searcher may hang
        found = []
        for step, (search, _) in sorted(self._in_flight.items()):
            why = search.exception() if search.done() else "the searchers do not answer"
            if why is None:
                found.append(search.result())
            else:
                log.warning(f"step {step}: its search failed, a resumed run searches again with newer weights: {why}")
        return found

    def restore(self, batches: Sequence[RetrievedBatch]) -> None:
        """Put the batches of a checkpoint into flight again; the LM scores them anew, or from its cache."""
        for batch in batches:
            found: Future[RetrievedBatch] = Future()
            found.set_result(batch)
            self._in_flight[batch.step] = self._submitted(found)

    def _searching(self, seconds: float) -> bool:
        """Return whether a search is still under way after at most `seconds`."""
        return bool(wait([search for search, _ in self._in_flight.values()], timeout=seconds).not_done)

    def _begin(self, step: int, query_step: int, index: IndexState) -> _InFlight:
        rows = self._sampler.rows(step)
        examples = self._queries.examples(rows)
        vectors = self._encode([example.query for example in examples])
        require_finite_vectors(vectors, [example.id for example in examples])
        exclude = [example.source for example in examples] if self._retrieve.exclude_own_source else None
        previous = self._last_search

        def search() -> RetrievedBatch:
            """Search, unless the previous search failed: the run ends at its step, and each may take minutes."""
            if previous is not None:
                previous.result()
            found = self._search(index.version, vectors, self._retrieve.k, exclude)
            seen = (step, query_step, found.index_version, index.step)
            return RetrievedBatch(*seen, rows, found.doc_rows, found.similarities)

        self._last_search = self._executor.submit(search)
        return self._submitted(self._last_search)

    def _submitted(self, search: Future[RetrievedBatch]) -> _InFlight:
        """Ask the LM after the search. If that fails, the documents are known and a checkpoint keeps them."""

        def ask() -> Scores:
            """Put the whole batch to the LM in one call, so that the pool can put pairs of similar length together."""
            batch, texts = search.result(), self._corpus.texts
            return self._score(self._queries.examples(batch.query_rows), [texts(rows) for rows in batch.doc_rows])

        return search, self._executor.submit(ask)


def score_in_calls(
    submit: Callable[..., Future[Any]],
    template: PromptTemplate,
    num_examples: int,
    load: Callable[[range], tuple[Sequence[Example], Iterable[Sequence[str | None]]]],
    calls_in_flight: int,
    check: Callable[[], None],
) -> Iterator[tuple[range, list[Any]]]:
    """Yield rows of examples and the scores of their pairs, grouped by example.

    Calls are counted from the first example, so scoring batches depend on the examples and the documents alone, also
    after kill -9: the cache has the finished scores, and no pair is computed twice.

    `load` gives the examples of some rows and the texts before each. `check` is called while waiting; it may raise to
    end the wait.
    """
    waiting: deque[tuple[range, Future[Any]]] = deque()
    for start in range(0, num_examples, EXAMPLES_PER_CALL):
        rows = range(start, min(start + EXAMPLES_PER_CALL, num_examples))
        waiting.append((rows, submit(*template.prompts(*load(rows)))))
        if len(waiting) == calls_in_flight:
            rows, scores = waiting.popleft()
            yield rows, wait_for(scores, check)
    for rows, scores in waiting:
        yield rows, wait_for(scores, check)
