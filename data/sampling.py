"""Deal texts to splits by keyed hashes: pure, and the same in any order, on any worker, after any restart.

A source text's split follows from its id. A piece's place in its split follows from its own words (`piece_key`): the
set holds the pieces of smallest keys, in their order, so equal pieces are neighbours. `KeyCounts` tracks which keys can
still be among the smallest. The training texts of a step follow from seed and step, so resuming needs no state.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

TEXT_SPLITS = ("heldout", "dev", "queries")  # in order of choice: none overlaps one before it
SPLITS = ("documents", "queries", "heldout", "dev")
BUCKETS_PER_OCTAVE = 256
MARGIN = 2


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the source texts for each split; the rest is the corpus.

    Development texts come from the other end of the range, so requesting some changes no training or held-out text.
    """

    queries: float
    heldout: float
    dev: float = 0.0


def split_of(source_id: str, seed: int, shares: Shares) -> str:
    """Return `queries`, `heldout`, `dev` or `documents`, by a keyed hash of the source's id."""
    point = _point(source_id, seed)
    if point < shares.queries:
        return "queries"
    if point < shares.queries + shares.heldout:
        return "heldout"
    if shares.dev and point >= 1 - shares.dev:
        return "dev"
    return "documents"


def _point(source_id: str, seed: int) -> float:
    digest = hashlib.blake2b(source_id.encode(), digest_size=8, key=f"side:{seed}".encode()).digest()
    return int.from_bytes(digest, "big") / 2**64  # changing the word `side` would change every text's split


def shares_of(source_ids: Iterable[str], seed: int, shares: Shares) -> Shares:
    """Return shares that give each split its part of these texts, at least one; hashes of few texts may give none."""
    points = [0.0, *sorted(_point(source_id, seed) for source_id in source_ids), 1.0]

    def border(number: int) -> float:
        """Return a point that `number` texts lie below."""
        return (points[number] + points[number + 1]) / 2

    def count(share: float) -> int:
        return max(1, round(share * (len(points) - 2))) if share else 0

    queries, heldout = count(shares.queries), count(shares.heldout)
    ends = [border(queries), border(queries + heldout)]
    dev = shares.dev and 1 - border(len(points) - 2 - count(shares.dev))
    return Shares(ends[0], ends[1] - ends[0], dev)


def piece_key(digest: bytes) -> int:
    """Return a piece's place among all: uniform over 64 bits."""
    return int.from_bytes(digest[:8], "big")


def buckets(keys: np.ndarray) -> np.ndarray:
    """Return the bucket [N] of each key [N]: 256 in every power of two, so that small shares are finely divided too."""
    exact = np.where(keys >> np.uint64(53) == 0, keys, keys & ~np.uint64(2**11 - 1))  # rounded down, as 53 bits hold it
    mantissa, exponent = np.frexp(np.maximum(exact, 1).astype(np.float64))
    return exponent * BUCKETS_PER_OCTAVE + ((mantissa - 0.5) * 2 * BUCKETS_PER_OCTAVE).astype(np.int64)


class KeyCounts:
    """How many pieces of one split have been seen in each bucket of keys."""

    def __init__(self, requested: int | None, least: int = 0) -> None:
        """Two pieces are kept for each requested one, since repeated and overlapping ones are dropped later.

        At least `least` pieces are kept if `requested` is above 0.
        """
        self._wanted = requested and max(MARGIN * requested, least)
        self._counts = np.zeros(66 * BUCKETS_PER_OCTAVE, np.int64)

    def add(self, counts: dict[int, int]) -> None:
        for bucket, count in counts.items():
            self._counts[bucket] += count

    @property
    def limit(self) -> int:
        """Return the last bucket that can still matter. It only falls, so a dropped piece is never needed later."""
        last = len(self._counts) - 1
        if self._wanted is None:
            return last
        return min(int(np.searchsorted(np.cumsum(self._counts), self._wanted)), last)

    def candidates(self) -> int:
        """Return pieces up to the limit."""
        return int(self._counts[: self.limit + 1].sum())

    def end(self) -> int:
        """Return the smallest key above the limit."""
        exponent, part = divmod(self.limit + 1, BUCKETS_PER_OCTAVE)
        return min(math.ceil(np.ldexp(0.5 + part / (2 * BUCKETS_PER_OCTAVE), exponent)), 2**64)


def key_ranges(end: int, candidates: int, per_range: int) -> list[tuple[int, int]]:
    """Return ranges of keys from 0 to `end`, about `per_range` pieces in each; keys are spread evenly."""
    number = max(1, -(-candidates // per_range))
    borders = [end * i // number for i in range(number + 1)]
    return list(itertools.pairwise(borders))


class QuerySampler:
    """Endless passes over the training texts, each in its own order; a batch may span two passes."""

    def __init__(self, num_queries: int, batch_size: int, seed: int) -> None:
        self.num_queries = num_queries
        self.batch_size = batch_size
        self.seed = seed

    def rows(self, step: int) -> np.ndarray:
        """Return rows [B] of the training texts for a step, counted from 0."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, offsets = positions // self.num_queries, positions % self.num_queries
        orders = {epoch: self._order(epoch) for epoch in np.unique(epochs)}
        return np.array([orders[epoch][offset] for epoch, offset in zip(epochs, offsets, strict=True)])

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, int(epoch)]).permutation(self.num_queries)
