"""Documents of other sources than a text's own: its neighbours in the corpus would tell what is to be predicted."""

from collections.abc import Callable, Sequence

import numpy as np

from replug.config.errors import UserError
from replug.data.store import Corpus
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.answers import search_excluding

Find = Callable[[int], RetrievedDocuments]  # the k best documents of every example


def require_sources(ids: Sequence[str], sources: Sequence[str | None]) -> None:
    """Raise UserError where an example names no source: what is its own would not be known."""
    if unknown := [identifier for identifier, source in zip(ids, sources, strict=True) if not source]:
        raise UserError(
            f"exclude_own_source is set, but {len(unknown)} of {len(ids)} texts name no source, {unknown[0]} for one; "
            "expected a source of each: the field `source` of held-out rows"
        )


def find_others(find: Find, corpus: Corpus, own: Sequence[str | None], k: int, at_least: int) -> RetrievedDocuments:
    """The k best documents that are not of each example's own source.

    Fewer where the corpus has no more; UserError where they would be fewer than `at_least`.
    """

    def search(queries: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        found = find(min(wanted, len(corpus.corpus)))
        return found.doc_rows, found.similarities

    try:
        return RetrievedDocuments(*search_excluding(search, corpus.corpus.sources, np.empty(0), k, own, at_least))
    except ValueError as error:
        raise UserError(f"exclude_own_source: {error}; ask for fewer by k") from error
