"""Which documents of each text the LM scores: the retriever's nearest, a tuned one's, BM25's best, random ones. Pure.

A document counts once: each of these gives others than those that are there. So every text has the same number, and
each document says who gave it and as which.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

DENSE, BM25, RANDOM, TUNED = range(4)  # places in `data.labels.GIVERS`
SMALL = 4096  # documents of a corpus that is drawn from in one permutation
Allowed = Callable[[int, np.ndarray], np.ndarray]  # of a text's row: which of these documents it may have


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many candidates of each kind a text gets."""

    dense: int
    bm25: int
    random: int
    tuned: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.tuned + self.bm25 + self.random


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of N texts: documents [N, K], who gave each, and as which, counted from 1."""

    doc_rows: np.ndarray
    given_by: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True, slots=True)
class Found:
    """What searches gave, best first: [N, dense], the others [N, any number]."""

    dense: np.ndarray
    bm25: np.ndarray
    tuned: np.ndarray


class TooFewFound(ValueError):
    """BM25 was asked for too few to have enough that are new."""


def mix_candidates(wanted: Wanted, found: Found, num_documents: int, seed: int, allowed: Allowed) -> Candidates:
    """The candidates of every text.

    Raises TooFewFound where a deeper search of BM25 may give what is missing, ValueError where the corpus has too few
    documents that a text may have.
    """
    texts = [_of_text(row, wanted, found, num_documents, seed, allowed) for row in range(len(found.dense))]
    columns = (np.stack(column) for column in zip(*texts, strict=True))
    return Candidates(*columns)


def any_document(row: int, doc_rows: np.ndarray) -> np.ndarray:
    """Allows all."""
    return np.ones(len(doc_rows), bool)


def other_sources(sources_of: Callable[[np.ndarray], list[str]], exclude: Sequence[str | None]) -> Allowed:
    """Allows what is not of the text's own source."""

    def allowed(row: int, doc_rows: np.ndarray) -> np.ndarray:
        return np.array([source != exclude[row] for source in sources_of(doc_rows)], bool)

    return allowed


def _of_text(
    row: int, wanted: Wanted, found: Found, num_documents: int, seed: int, allowed: Allowed
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    others = partial(_others, allowed=partial(allowed, row))
    dense = found.dense[row][: wanted.dense].tolist()
    tuned, tuned_ranks = others([found.tuned[row]], wanted.tuned, {*dense})
    bm25, bm25_ranks = others([found.bm25[row]], wanted.bm25, {*dense, *tuned})
    if len(bm25) < wanted.bm25:
        raise TooFewFound(f"BM25 gave {len(bm25)} new documents, {wanted.bm25} are wanted")
    drawn = _drawn(num_documents, wanted.random, np.random.default_rng([seed, row]))
    random, _ = others(drawn, wanted.random, {*dense, *tuned, *bm25})
    if len(random) < wanted.random:
        raise ValueError(f"the corpus has {num_documents} documents, too few for {wanted.total} candidates of a text")
    ranks = [*range(1, len(dense) + 1), *tuned_ranks, *bm25_ranks, *range(1, len(random) + 1)]
    givers = np.repeat([DENSE, TUNED, BM25, RANDOM], [len(dense), len(tuned), len(bm25), len(random)])
    return np.array([*dense, *tuned, *bm25, *random], np.int64), givers, np.array(ranks, np.int64)


def _others(
    offered: Iterable[np.ndarray], count: int, taken: set[int], allowed: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[int], list[int]]:
    """The first `count` documents that are not taken and are allowed, and their places in the offers, from 1."""
    chosen: dict[int, int] = {}
    place = 0
    for rows in offered if count else ():
        for doc, is_allowed in zip(rows.tolist(), allowed(rows).tolist(), strict=True):
            place += 1
            if is_allowed and doc not in taken and doc not in chosen:
                chosen[doc] = place
            if len(chosen) == count:
                return list(chosen), list(chosen.values())
    return list(chosen), list(chosen.values())


def _drawn(num_documents: int, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Random documents, some at a time: all of a small corpus in a random order, of a large one without end."""
    if num_documents <= SMALL:
        yield rng.permutation(num_documents)
        return
    while True:
        yield rng.integers(num_documents, size=2 * count)
