"""Hashes of texts: which are equal, and which is which. Pure, and the same on every machine.

N-grams of words, 13 of them as a rule, are those by which decontamination finds overlaps (Brown et al. 2020).
"""

import functools
import hashlib

import numpy as np

from replug.data.words import compared_words


def normalise(text: str) -> str:
    """Return a text with single spaces and folded case: texts are equal if these are."""
    return " ".join(text.split()).casefold()


def content_hash(text: str, seed: int = 0) -> bytes:
    """Return 16 bytes that equal texts share."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16, key=f"sample:{seed}".encode()).digest()


def hash64(text: str) -> int:
    """Return 64 bits of a text's hash, to tell texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_word_hash = functools.lru_cache(1 << 17)(hash64)


def ngram_hashes(text: str, n: int) -> np.ndarray:
    """Return hashes uint64 of a text's n-grams of words, case and punctuation aside; none if it has fewer words."""
    words = np.array([_word_hash(word) for word in compared_words(text)], np.uint64)
    if len(words) < n:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(words, n)
    powers = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(n)], np.uint64)  # odd: all words reach 64 bits
    hashes = (windows * powers).sum(axis=1, dtype=np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(factor)
    return hashes


def without_common(hashes: np.ndarray, n: int, common: np.ndarray) -> np.ndarray:
    """Return the hashes of a text's n-grams without those that share a word with one of the `common` ones (sorted)."""
    places = np.flatnonzero(is_known(hashes, common))
    if not len(places):
        return hashes
    near = (places[:, None] + np.arange(1 - n, n)).ravel()
    return np.delete(hashes, near[(near >= 0) & (near < len(hashes))])


def overlaps(hashes: np.ndarray, known: np.ndarray) -> bool:
    """Return whether one of the hashes is among the known ones, which are sorted."""
    return bool(is_known(hashes, known).any())


def is_known(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return for each hash whether it is among the known ones, which are sorted and may lie in a mapped file."""
    if not len(known):
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return known[places] == hashes
