"""Cut texts into words in any script, to search by and to compare by, and hash words and texts. Pure.

Scripts that set no blanks between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are searched by pairs of
characters, as benchmarks of retrieval do, and compared in pieces of a few characters. Elsewhere a word is a run of
letters, marks, digits and underscores; without the marks a Hindi word would end at each of its vowels.

Hashes are the same on every machine. N-grams of words, usually 13-grams, find overlaps as in decontamination (Brown et
al. 2020).
"""

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Iterable

import numpy as np
import regex

# Classes of characters, for patterns of `regex`; some are marks of punctuation that go with these scripts.
_SHORT = r"\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}"  # scripts with words of about two characters
_LONG = r"\p{scx=Thai}\p{scx=Lao}\p{scx=Khmer}\p{scx=Myanmar}"  # of about four
WITHOUT_BLANKS = _SHORT + _LONG
_CHARACTER = r"[\p{L}\p{M}\p{N}_]"
_WORDS = regex.compile(rf"(?:(?=[{WITHOUT_BLANKS}]){_CHARACTER})+|(?:(?![{WITHOUT_BLANKS}]){_CHARACTER})+")
_HAS_BLANKS = regex.compile(rf"[^{WITHOUT_BLANKS}]")
_IS_LONG = regex.compile(rf"[{_LONG}]")
_NEEDS_MORE = regex.compile(rf"[\p{{M}}{WITHOUT_BLANKS}]")  # than the faster patterns below
_PLAIN, _PLAIN_PAIR = re.compile(r"\w+"), re.compile(r"\w\w+")


def search_words(text: str) -> list[str]:
    """Return the words to search by, in lower case and in order: words of two characters or more, and pairs."""
    text, words = text.lower(), list[str]()
    if text.isascii() or not _NEEDS_MORE.search(text):
        return _PLAIN_PAIR.findall(text)
    for word in _WORDS.findall(text):
        if not _HAS_BLANKS.match(word):
            words += [first + second for first, second in itertools.pairwise(word)] or [word]
        elif len(word) > 1:
            words.append(word)
    return words


def compared_words(text: str) -> list[str]:
    """Return the words that n-grams are made of, with case folded.

    In texts without blanks, two adjacent characters alone decide whether a piece ends between them, so all texts cut a
    shared passage in the same way.
    """
    text, words = text.casefold(), list[str]()
    if text.isascii() or not _NEEDS_MORE.search(text):
        return _PLAIN.findall(text)
    for word in _WORDS.findall(text):
        words += [word] if _HAS_BLANKS.match(word) else _pieces(word)
    return words


def _pieces(run: str) -> list[str]:
    bounds = [place for place in range(1, len(run)) if _ends_between(run[place - 1 : place + 1])]
    return [run[start:end] for start, end in itertools.pairwise([0, *bounds, len(run)])]


@functools.lru_cache(1 << 16)
def _ends_between(pair: str) -> bool:
    """Return whether a piece ends between two characters: as often as gives words of the usual length."""
    return zlib.crc32(pair.encode()) % (4 if _IS_LONG.match(pair) else 2) == 0


# Hashes -------------------------------------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Return a text with single spaces and folded case, for comparison."""
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
    """Return the hashes of a text's n-grams without n-grams that share a word with a `common` one (sorted)."""
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


LEAST_COMMON = 5  # sources


def common_ngrams(hashes_by_source: Iterable[np.ndarray]) -> np.ndarray:
    """Return the n-grams, sorted hashes, that half of the sources hold: headers, footers and licences are no leak.

    Each array is of one source. An n-gram of fewer than five sources is never common.
    """
    unique = [np.unique(hashes) for hashes in hashes_by_source]
    hashes, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *unique]), return_counts=True)
    return hashes[counts >= common_from(len(unique))]


def common_from(num_sources: int) -> int:
    """Return the number of sources that must hold an n-gram to make it common."""
    return max(LEAST_COMMON, -(-num_sources // 2))
