"""The live encoder's order of what the index finds, against brute force."""

import numpy as np
import pytest
import torch

from replug.data.records import Document, SearchResult
from replug.data.shards import write_documents
from replug.data.store import CorpusStore
from replug.index_workers.answers import search_excluding
from replug.index_workers.build import LiveReranker

DIM, ROWS = 8, 40
RNG = np.random.default_rng(0)
LIVE = RNG.standard_normal((ROWS, DIM)).astype(np.float32)
STALE = LIVE + 0.5 * RNG.standard_normal(LIVE.shape).astype(np.float32)
QUERIES = RNG.standard_normal((5, DIM)).astype(np.float32)


class Parts:
    """An index over stale vectors and an encoder of live ones; what each is asked is written down."""

    def __init__(self, corpus: CorpusStore) -> None:
        self.corpus, self.asked, self.encoded = corpus, [], []

    def search(self, version, queries, k, exclude=None, at_least=None) -> SearchResult:
        self.asked.append((version, k, exclude, at_least))
        similarities = queries @ STALE.T
        rows = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
        return SearchResult(rows, np.take_along_axis(similarities, rows, axis=1), version)

    def encode(self, texts) -> torch.Tensor:
        self.encoded.append(list(texts))
        return torch.from_numpy(LIVE[[int(text) for text in texts]])

    def reranker(self, overretrieve: int) -> LiveReranker:
        return LiveReranker(self.search, self.encode, self.corpus, overretrieve)


@pytest.fixture
def parts(tmp_path) -> Parts:
    """A document's text is its row."""
    write_documents(tmp_path / "documents", [Document(f"d{i}", str(i), "x", "s") for i in range(ROWS)])
    return Parts(CorpusStore(tmp_path / "documents"))


def ranked(vectors: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """The best k of candidate rows [B, C] by these vectors."""
    similarities = np.take_along_axis(QUERIES.astype(np.float64) @ vectors.T.astype(np.float64), rows, axis=1)
    return np.take_along_axis(rows, np.argsort(-similarities, axis=1, kind="stable")[:, :k], axis=1)


def test_candidates_are_ordered_by_their_live_vectors(parts):
    found = parts.reranker(3)(4, QUERIES, 5)
    candidates = np.argsort(-(QUERIES @ STALE.T), axis=1, kind="stable")[:, :15]
    assert parts.asked == [(4, 15, None, 5)]
    np.testing.assert_array_equal(found.doc_rows, ranked(LIVE, candidates, 5))
    expected = np.take_along_axis(QUERIES @ LIVE.T, found.doc_rows, axis=1)
    np.testing.assert_allclose(found.similarities, expected, rtol=1e-5)
    assert found.index_version == 4
    assert found.similarities.dtype == np.float32


def test_a_corpus_with_enough_documents_but_fewer_candidates_of_other_sources_is_enough(parts):
    def sources_of(rows) -> list[str]:
        return ["own" if row < 10 else "other" for row in rows]

    def search(version, queries, k, exclude=None, at_least=None) -> SearchResult:
        def plain(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            found = parts.search(version, queries, k)
            return found.doc_rows, found.similarities

        return SearchResult(*search_excluding(plain, sources_of, queries, k, exclude, at_least), version)

    found = LiveReranker(search, parts.encode, parts.corpus, 4)(0, QUERIES, 8, ["own"] * 5)
    assert found.doc_rows.shape == (5, 8)
    assert found.doc_rows.min() >= 10
