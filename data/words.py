"""Cut texts into words in any script, to search by and to compare by. Pure.

Scripts that set no blanks between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are searched by pairs of
characters, as benchmarks of retrieval do, and compared in pieces of a few characters. Elsewhere a word is a run of
letters, marks, digits and underscores; without the marks a Hindi word would end at each of its vowels.
"""

import functools
import itertools
import re
import zlib

import regex

# Classes of characters, for patterns of `regex`; some are marks of punctuation that go with these scripts.
_SHORT = r"\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}"  # scripts with words of about two characters
_LONG = r"\p{scx=Thai}\p{scx=Lao}\p{scx=Khmer}\p{scx=Myanmar}"  # of about four
WITHOUT_BLANKS = _SHORT + _LONG
_CHARACTER = r"[\p{L}\p{M}\p{N}_]"
_WORDS = regex.compile(rf"(?:(?=[{WITHOUT_BLANKS}]){_CHARACTER})+|(?:(?![{WITHOUT_BLANKS}]){_CHARACTER})+")
_HAS_BLANKS = regex.compile(rf"[^{WITHOUT_BLANKS}]")
_IS_LONG = regex.compile(rf"[{_LONG}]")
_NEEDS_MORE = regex.compile(rf"[\p{{M}}{WITHOUT_BLANKS}]")  # than these, which are several times as fast
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

    Pieces of texts without blanks end where the two characters say so that stand there, so a passage that two texts
    share is cut alike in both.
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
    """Return whether a piece ends between two characters: of random pairs as many as give words of the usual length."""
    return zlib.crc32(pair.encode()) % (4 if _IS_LONG.match(pair) else 2) == 0
