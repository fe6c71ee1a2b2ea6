"""BM25 over a corpus: the retriever without training that dense ones are compared with.

The formula is Lucene's, with k1 = 1.5 and b = 0.75, the defaults of bm25s (Kamphuis et al. 2020 compare the variants):

    score(q, d) = sum over the words w of q of  log(1 + (N - n_w + 0.5) / (n_w + 0.5))
                                               * f_wd / (f_wd + k1 (1 - b + b |d| / mean |d|))

Words are those of `data.words`, in any script, without the most frequent English ones. The index of `bm25s` takes 2 KiB
for each document of 80 words, 72 GB for 36M, so `search_bm25` reads the documents twice, a chunk in memory at a time,
and gives the scores of bm25s to the last bit.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.words import search_words


def _import_bm25s() -> Any:
    """Import bm25s as if there were no jax: it would begin to use it, which takes three quarters of a GPU's memory."""
    is_hidden = sys.modules.setdefault("jax", None) is None  # type: ignore[arg-type]
    try:
        import bm25s

        return bm25s
    finally:
        if is_hidden:
            del sys.modules["jax"]


bm25s = _import_bm25s()
STOP_WORDS = frozenset(bm25s.stopwords.STOPWORDS_EN)
K1, B = 1.5, 0.75
CHUNK_DOCUMENTS = 50_000
NO_WORD = "the corpus holds no word that BM25 could search by; expected documents of text"


def search_bm25(texts: Callable[[], Iterable[str]], queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and scores [B, k], best first, for B queries; documents of equal score in the order of their rows.

    `texts()` gives the documents in row order, and is called twice. A score is 0 where query and document share no
    word, and above 0 where they do: a query without a word of the corpus gets the rows from 0 on, all with score 0.
    Where the corpus has fewer than k, so many columns. Raises UserError where it holds no word to search by.
    """
    words = [_words_of(query) for query in queries]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(itertools.chain.from_iterable(words)))}
    asked = [[numbers[word] for word in of] for of in words]
    num_documents, containing, mean_length = _count_corpus(texts(), numbers)
    best = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))] * len(queries)
    start = 0
    weights = [math.log(1 + (num_documents - c + 0.5) / (c + 0.5)) for c in containing.tolist()]
    for counts in _count_chunks(texts(), numbers):
        scores_of = _scorer(counts, np.array(weights, dtype=np.float32), mean_length)
        best = [_better(found, scores_of(of), start, k) for found, of in zip(best, asked, strict=True)]
        start += len(counts[0])
    found = min(k, num_documents)
    rows = np.array([rows for rows, _ in best], dtype=np.int64).reshape(len(queries), found)
    return rows, np.array([scores for _, scores in best], dtype=np.float32).reshape(len(queries), found)


def without_words(scores: np.ndarray) -> str | None:
    """Say that most queries share no word with the corpus, by their scores [B, k]; None where most do."""
    num_without = int((scores[:, :1] == 0).sum())
    if num_without * 2 <= len(scores):
        return None
    return f"BM25 finds no word of {num_without:,} of {len(scores):,} texts in the corpus, so its order says nothing"


class BM25Index:
    """The same scores from an index in memory, 2 KiB for each document, so that a search reads no corpus.

    It is there to measure what a search takes. Raises UserError where the corpus holds no word to search by.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        words = [_words_of(text) for text in texts]
        if not any(words):
            raise UserError(NO_WORD)
        self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
        self._bm25.index(words, show_progress=False)

    def search(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and scores [k] of a query's best documents; of equal ones any."""
        k = min(k, self._bm25.scores["num_docs"])
        rows, scores = self._bm25.retrieve([_words_of(query)], k=k, show_progress=False)
        return rows[0], scores[0]


def _words_of(text: str) -> list[str]:
    return [word for word in search_words(text) if word not in STOP_WORDS]


def _count_corpus(texts: Iterable[str], numbers: dict[str, int]) -> tuple[int, np.ndarray, float]:
    """Return N, n_w of the queries' words, and mean |d|."""
    num_documents = num_words = 0
    containing = np.zeros(len(numbers), dtype=np.int64)
    for lengths, words, *_ in _count_chunks(texts, numbers):
        num_documents += len(lengths)
        num_words += int(lengths.sum())
        containing += np.bincount(words, minlength=len(numbers))
    if not num_words:
        raise UserError(NO_WORD)
    return num_documents, containing, num_words / num_documents


def _count_chunks(texts: Iterable[str], numbers: dict[str, int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield of each chunk the documents' lengths in words; then words, documents and frequencies f_wd.

    The three latter are of the queries' words alone, ordered by word, then document.
    """
    documents, number_of = iter(texts), numbers.get
    while chunk := list(itertools.islice(documents, CHUNK_DOCUMENTS)):
        words_of = [_words_of(text) for text in chunk]
        lengths = np.array([len(of) for of in words_of], dtype=np.int64)
        words = np.array([number_of(word, -1) for of in words_of for word in of], dtype=np.int64)
        places = words * len(chunk) + np.repeat(np.arange(len(chunk)), lengths)
        found, frequencies = np.unique(places[words >= 0], return_counts=True)
        yield lengths, *np.divmod(found, len(chunk)), frequencies


def _scorer(
    counts: tuple[np.ndarray, ...], weights: np.ndarray, mean_length: float
) -> Callable[[Sequence[int]], np.ndarray]:
    """Return what gives the scores [documents of the chunk] of a query by the numbers of its words."""
    lengths, words, documents, frequencies = counts
    saturation = K1 * ((1 - B) + B * lengths / mean_length)
    parts = (weights[words] * (frequencies / (saturation[documents] + frequencies))).astype(np.float32)
    bounds = np.searchsorted(words, np.arange(len(weights) + 1))

    def scores_of(query: Sequence[int]) -> np.ndarray:
        scores = np.zeros(len(lengths), dtype=np.float32)
        for word in query:
            here = slice(bounds[word], bounds[word + 1])
            scores[documents[here]] += parts[here]
        return scores

    return scores_of


def _better(found: tuple[np.ndarray, np.ndarray], scores: np.ndarray, start: int, k: int) -> tuple:
    """Return the k best rows and scores of those found and of the next documents, from row `start` on."""
    rows, best = found
    above = np.flatnonzero(scores > best[-1]) if len(best) == k else np.arange(len(scores))
    rows, best = np.concatenate([rows, above + start]), np.concatenate([best, scores[above]])
    order = np.argsort(-best, kind="stable")[:k]
    return rows[order], best[order]
