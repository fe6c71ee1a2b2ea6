"""Decide whether an answer is right: exact match and token F1 (SQuAD 1.1), containment (PopQA, DPR). Pure."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# DPR's SimpleTokenizer: runs of letters, digits and marks, and any other visible character by itself.
_WORDS = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


def normalize_answer(text: str) -> str:
    """Return a text in lower case without ASCII punctuation and English articles, one space between words (SQuAD)."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 where the normalised prediction is one of the normalised answers, else 0.

    As in SQuAD and DPR, an answer of articles alone, such as "A", normalises to nothing, as an empty prediction does.
    """
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers})


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 of the normalised words, the best over the answers; 1 for an exact match."""
    best, predicted = 0.0, normalize_answer(prediction).split()
    for answer in answers:
        expected = normalize_answer(answer).split()
        if predicted == expected:  # both may be empty
            return 1.0
        common = (Counter(predicted) & Counter(expected)).total()
        best = max(best, 2 * common / (len(predicted) + len(expected)))
    return best


def has_answer(document: str, answers: Sequence[str]) -> bool:
    """Return whether the document's tokens hold those of an answer in a row: DPR's `has_answer`, by strings.

    Both are put into Unicode's NFD, cut into tokens and lowered. An answer without a token is held by no document.
    """
    text = f" {' '.join(answer_tokens(document))} "
    return any(words and f" {' '.join(words)} " in text for words in map(answer_tokens, answers))


def answer_spans(document: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    """Return where a document holds answers as `has_answer` finds them: characters (start, end), none in another."""
    found = list(_WORDS.finditer(document))
    tokens = [unicodedata.normalize("NFD", match.group()).lower() for match in found]
    wanted = sorted(filter(None, map(answer_tokens, answers)), key=len, reverse=True)
    spans, place = [], 0
    while place < len(tokens):
        length = next((len(words) for words in wanted if tokens[place : place + len(words)] == words), 0)
        if length:
            spans.append((found[place].start(), found[place + length - 1].end()))
        place += length or 1
    return spans


def contains_answer(prediction: str, answers: Sequence[str]) -> bool:
    """Return whether the prediction contains an answer as it is written, in lower case, or capitalised.

    The rule of PopQA's official code (Mallen et al. 2023, `run_model.py`), which compares characters and not words:
    "art" is contained in "Stuttgart", and an answer in another Unicode form is not found.
    """
    return any(
        answer in prediction or answer.lower() in prediction or answer.capitalize() in prediction for answer in answers
    )


def answer_tokens(text: str) -> list[str]:
    """Return DPR's tokens of a text in Unicode's NFD, in lower case."""
    return [token.lower() for token in _WORDS.findall(unicodedata.normalize("NFD", text))]
