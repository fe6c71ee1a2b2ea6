"""BM25 over a corpus: the untrained baseline of dense retrievers.

The formula is Lucene's, with k1 = 1.5 and b = 0.75, the defaults of bm25s (Kamphuis et al. 2020 compare the variants):

    score(q, d) = sum over the words w of q of  log(1 + (N - n_w + 0.5) / (n_w + 0.5))
                                               * f_wd / (f_wd + k1 (1 - b + b |d| / mean |d|))

`data.words` cuts words in any script; the most frequent English ones do not count. The documents are read twice, with a
chunk in memory at a time, and the scores match bm25s to the last bit.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from replug.config.errors import UserError
from replug.data.words import search_words

STOP_WORDS = {  # from Lucene
    *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not"),
    *("of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was"),
    *("will", "with"),
}
K1, B = 1.5, 0.75
CHUNK_DOCUMENTS = 50_000
NO_WORD = "the corpus holds no word that BM25 could search by; expected documents of text"


def search_bm25(texts: Callable[[], Iterable[str]], queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and scores [B, k], best first, for B queries; documents of equal score in the order of their rows.

    `texts()` gives the documents in row order, and is called twice. A score is 0 where query and document share no
    word, and above 0 where they do: a query without a word of the corpus gets the rows from 0 on, all with score 0.
    A corpus of fewer than k documents gives that number of columns. Raises UserError if it has no word to search by.
    """
    words = [_words_of(query) for query in queries]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(itertools.chain.from_iterable(words)))}
    weights, mean_length = _weighing(_count_chunks(texts(), numbers), len(numbers))
    best = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))] * len(queries)
    start = 0
    for lengths, counted, documents, frequencies in _count_chunks(texts(), numbers):
        saturation = K1 * ((1 - B) + B * lengths / mean_length)
        parts = (weights[counted] * (frequencies / (saturation[documents] + frequencies))).astype(np.float32)
        bounds = np.searchsorted(counted, np.arange(len(weights) + 1))
        for query, own in enumerate(words):
            scores = np.zeros(len(lengths), dtype=np.float32)
            for number in map(numbers.__getitem__, own):
                here = slice(bounds[number], bounds[number + 1])
                scores[documents[here]] += parts[here]
            best[query] = _better(best[query], scores, start, k)
        start += len(lengths)
    rows, scores_of = zip(*best, strict=True) if best else ((), ())
    shape = len(queries), min(k, start)
    return np.array(rows, np.int64).reshape(shape), np.array(scores_of, np.float32).reshape(shape)


def without_words(scores: np.ndarray) -> str | None:
    """Return a warning if most queries share no word with the corpus, by their scores [B, k]; else None."""
    num_without = int((scores[:, :1] == 0).sum())
    if num_without * 2 <= len(scores):
        return None
    return f"BM25 finds no word of {num_without:,} of {len(scores):,} texts in the corpus, so its order says nothing"


def _words_of(text: str) -> list[str]:
    return [word for word in search_words(text) if word not in STOP_WORDS]


def _weighing(chunks: Iterable[tuple[np.ndarray, ...]], num_words: int) -> tuple[np.ndarray, float]:
    """Return the weight of each numbered word, and mean |d|, of a corpus."""
    num_documents = total = 0
    containing = np.zeros(num_words, dtype=np.int64)
    for lengths, words, *_ in chunks:
        num_documents += len(lengths)
        total += int(lengths.sum())
        containing += np.bincount(words, minlength=num_words)
    if not total:
        raise UserError(NO_WORD)
    weights = [math.log(1 + (num_documents - count + 0.5) / (count + 0.5)) for count in containing.tolist()]
    return np.array(weights, dtype=np.float32), total / num_documents


def _count_chunks(texts: Iterable[str], numbers: dict[str, int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield for each chunk the documents' lengths in words; then words, documents and frequencies f_wd.

    The last three cover the queries' words alone, ordered by word, then document.
    """
    documents, number_of = iter(texts), numbers.get
    while chunk := list(itertools.islice(documents, CHUNK_DOCUMENTS)):
        words_of = [_words_of(text) for text in chunk]
        lengths = np.array([len(of) for of in words_of], dtype=np.int64)
        words = np.array([number_of(word, -1) for of in words_of for word in of], dtype=np.int64)
        places = words * len(chunk) + np.repeat(np.arange(len(chunk)), lengths)
        kept, frequencies = np.unique(places[words >= 0], return_counts=True)
        yield lengths, *np.divmod(kept, len(chunk)), frequencies


def _better(before: tuple[np.ndarray, np.ndarray], scores: np.ndarray, start: int, k: int) -> tuple:
    """Merge the best rows and scores `before` with the scores of documents from row `start` on; returns the k best."""
    rows, best = before
    above = np.flatnonzero(scores > best[-1]) if len(best) == k else np.arange(len(scores))
    rows, best = np.concatenate([rows, above + start]), np.concatenate([best, scores[above]])
    order = np.argsort(-best, kind="stable")[:k]
    return rows[order], best[order]
