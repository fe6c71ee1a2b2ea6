"""Documents in another order: by how likely the LM finds the query after each (Ram et al. 2023, zero-shot reranking).

The likelihood is that of the whole query, a context or a question, as Sachan et al. 2022 have it for questions. Ram et
al. take the last 16 tokens of a context. It takes no training. Scores lie in the LM's cache, so an interrupted
evaluation finds those it has.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from replug.config.methods import Method
from replug.data.progress import Progress
from replug.data.store import CorpusStore
from replug.evals.evidence import RetrievedDocuments
from replug.evals.kinds import PromptedLM
from replug.evals.loop import EXAMPLES_IN_FLIGHT

Scores = Callable[[], np.ndarray]  # waits for log-probs [K]


def reranked(
    asked: PromptedLM,
    methods: Sequence[Method],
    corpus: CorpusStore,
    found: Mapping[str, RetrievedDocuments],
    queries: Sequence[str],
) -> dict[str, RetrievedDocuments]:
    """What each reranked method reads, by its name: its source's first k documents, the likeliest query first."""
    return {
        method.name: _rerank(asked, method, corpus, found[method.source], queries)
        for method in methods
        if method.is_reranked
    }


def _rerank(
    asked: PromptedLM, method: Method, corpus: CorpusStore, found: RetrievedDocuments, queries: Sequence[str]
) -> RetrievedDocuments:
    rows, progress = found.doc_rows[:, : method.k], Progress(f"reranking: {method.name}", len(queries))
    ordered = []
    for row, scores in enumerate(_in_order(asked, corpus, rows, queries)):
        ordered.append(rows[row][np.argsort(-scores, kind="stable")])
        progress.advance()
    return RetrievedDocuments(np.stack(ordered), np.zeros(rows.shape))


def _in_order(asked: PromptedLM, corpus: CorpusStore, rows: np.ndarray, queries: Sequence[str]) -> Iterator[np.ndarray]:
    """Scores [K] of each query, some queries at a time."""
    in_flight: deque[Scores] = deque()
    for documents, query in zip(rows, queries, strict=True):
        in_flight.append(_submit(asked, corpus.texts(documents), query))
        if len(in_flight) > EXAMPLES_IN_FLIGHT:
            yield in_flight.popleft()()
    while in_flight:
        yield in_flight.popleft()()


def _submit(asked: PromptedLM, documents: Sequence[str], query: str) -> Scores:
    """Of a blank query, which nothing is read for, all are alike."""
    if not query.strip():
        return lambda: np.zeros(len(documents))
    prefixes = [asked.template.prefix(document, "", query) for document in documents]
    future = asked.lm.submit(prefixes, [query] * len(prefixes))
    return lambda: np.array([score.sum_logprob for score in future.result()])
