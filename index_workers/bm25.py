"""BM25 over a corpus by `bm25s`: the retriever without training that dense ones are compared with.

The formula is Lucene's, with k1 = 1.5 and b = 0.75, the defaults of bm25s (Kamphuis et al. 2020 compare the variants):

    score(q, d) = sum over the words w of q of  log(1 + (N - n_w + 0.5) / (n_w + 0.5))
                                               * f_wd / (f_wd + k1 (1 - b + b |d| / mean |d|))

Words are runs of two or more letters, digits or underscores, in lower case, without bm25s's 33 English stop words and
not stemmed. A word that a query repeats counts each time.
"""

from collections.abc import Iterable, Sequence

import bm25s
import numpy as np

from replug.configs.errors import UserError

STOP_WORDS = "english"


class Bm25Index:
    """Built of the documents' texts in row order. Raises UserError where they hold no word to search by.

    It holds 8 bytes for each different word of each document; while it is built, about 2 KiB for each document of 80
    words. The time of a search grows with the corpus.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        tokens = bm25s.tokenize(texts, stopwords=STOP_WORDS, show_progress=False)
        if not tokens.vocab:
            raise UserError("the corpus holds no word that BM25 could search by; expected documents with English words")
        self._index = bm25s.BM25(method="lucene")
        self._index.index(tokens, create_empty_token=False, show_progress=False)

    def __len__(self) -> int:
        return int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores [B, k], best first, for B queries; documents of equal score in the order of their rows.

        A score is 0 where query and document share no word, and above 0 where they do: a query without a word of
        the corpus gets the rows from 0 on, all with score 0. Where the corpus has fewer than k, so many columns.
        """
        found = min(k, len(self))
        doc_rows = np.empty((len(queries), found), dtype=np.int64)
        scores = np.empty((len(queries), found), dtype=np.float32)
        for place, query in enumerate(queries):
            doc_rows[place], scores[place] = _top_k(self._scores(query), found)
        return doc_rows, scores

    def _scores(self, query: str) -> np.ndarray:
        """Scores [documents] of one query."""
        tokens = bm25s.tokenize(query, stopwords=STOP_WORDS, return_ids=False, show_progress=False)[0]
        return self._index.get_scores_from_ids(self._index.get_tokens_ids(tokens))


def _top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and values [k] of the largest; equal ones in the order of their rows."""
    if k == 0:
        return np.empty(0, dtype=np.int64), scores[:0]
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    rows = np.concatenate([above, np.flatnonzero(scores == least)[: k - len(above)]])
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    return rows, scores[rows]
