"""The engine that the caller has over its own documents: nothing is asked for or fetched.

LocalEngine(BM25Retriever(documents))                 # lexical
LocalEngine(IndexRetriever(LocalIndex(root, threads)))  # a published index, dense
"""

import hashlib
from collections.abc import Iterable, Sequence

from replug.config.errors import UserError
from replug.data.records import Document
from replug.index_workers.bm25 import BM25Index
from replug.models.ensemble import Retrieved, Retriever
from replug.web.engines import EngineParts
from replug.web.records import EngineResult, SearchEngine


class BM25Retriever:
    """A `Retriever` over documents in memory. One that shares no word with a query is not found."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = list(documents)
        self._index = BM25Index(document.text for document in self._documents)
        digest = hashlib.sha256()
        for document in self._documents:
            digest.update(f"{len(document.id)} {len(document.text)} {document.id}{document.text}".encode())
        self.identity = f"bm25:{digest.hexdigest()[:16]}"

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Up to `k` documents for each query, best first; those of equal score by row."""
        return [self._best(query, k) for query in queries]

    def _best(self, query: str, k: int) -> list[Retrieved]:
        rows, scores = self._index.search(query, k)
        found = sorted((-float(score), int(row)) for row, score in zip(rows, scores, strict=True) if score > 0)
        return [Retrieved(self._documents[row].text, -score, self._documents[row].id) for score, row in found]


class LocalEngine:
    """A `SearchEngine` over a retriever. `titles` are those of documents by id, where they are known.

    `identity` says which documents and which retriever; a retriever that has one gives it.
    """

    def __init__(self, retriever: Retriever, identity: str = "", titles: dict[str, str] | None = None) -> None:
        self._retriever, self._titles = retriever, titles or {}
        self.identity = f"local {identity or getattr(retriever, 'identity', '')}".strip()

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        found = self._retriever.retrieve([query], num_results)[0]
        return [
            EngineResult(
                url=f"document:{one.id}",
                title=self._titles.get(one.id, ""),
                rank=rank,
                text=one.text,
                doc_id=one.id,
                similarity=one.similarity,
            )
            for rank, one in enumerate(found, 1)
        ]


def _of_caller(parts: EngineParts) -> SearchEngine:
    if parts.local is None:
        raise UserError("web.engine=local searches documents, and there are none; expected a corpus or another engine")
    return parts.local


ENGINE = _of_caller
