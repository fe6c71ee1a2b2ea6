"""Decide whether an answer is right: exact match and token F1 (SQuAD 1.1), containment (PopQA, DPR). Pure."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex

from replug.data.words import WITHOUT_BLANKS

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OTHER_PUNCTUATION = regex.compile(r"\p{P}+")
_SINGLE = regex.compile(rf"([{WITHOUT_BLANKS}])")
# DPR's SimpleTokenizer: runs of letters, digits and marks, and any other visible character by itself; where a script
# sets no blanks between words, each character.
_WORDS = regex.compile(rf"(?:(?![{WITHOUT_BLANKS}])[\p{{L}}\p{{N}}\p{{M}}])+|[^\p{{Z}}\p{{C}}]")


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation and English articles, one space between words.

    SQuAD's rule, with the punctuation of other scripts as in MLQA (Lewis et al. 2020).
    """
    words = re.sub(r"\b(a|an|the)\b", " ", _OTHER_PUNCTUATION.sub("", text.lower().translate(_PUNCTUATION)))
    return " ".join(words.split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 where the normalised prediction is one of the normalised answers, else 0.

    As in SQuAD and DPR, an answer of articles alone, such as "A", normalises to nothing, as an empty prediction does.
    """
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers})


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 of the normalised words, the best over the answers; 1 for an exact match.

    Where a script sets no blanks between words, each character is one, as in MLQA.
    """
    best, predicted = 0.0, _normal_words(prediction)
    for answer in answers:
        expected = _normal_words(answer)
        if predicted == expected:  # both may be empty
            return 1.0
        common = (Counter(predicted) & Counter(expected)).total()
        best = max(best, 2 * common / (len(predicted) + len(expected)))
    return best


def _normal_words(text: str) -> list[str]:
    return _SINGLE.sub(r" \1 ", normalize_answer(text)).split()


def has_answer(document: str, answers: Sequence[str]) -> bool:
    """Return whether the document holds the tokens of an answer consecutively: DPR's `has_answer`, by strings.

    Document and answer are converted to Unicode's NFD, tokenized and lowered. Unlike DPR's, a token of a script without
    blanks between words is one character: DPR takes a whole clause for a word, which no answer equals. No document
    holds an answer without tokens.
    """
    text = f" {' '.join(answer_tokens(document))} "
    return any(words and f" {' '.join(words)} " in text for words in map(answer_tokens, answers))


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
