"""Passages of a page, and how near each is to the question (Lazaridou et al. 2022, section 2.2).

A passage is up to six sentences, by `sentencex`, which needs no download and whose time is linear in the text. A blank
line or line break of the main text ends a sentence and not a passage. Nearness is the cosine of TF-IDF vectors by
scikit-learn's defaults (words of two letters or more in lower case; idf = log((1 + N) / (1 + n_w)) + 1), whose N
passages are those of this question, as the paper's are: the same passage may be nearer beside others. p_tfidf(p|q) is
the cosine over the sum of the cosines of the passages that are kept, no softmax.
"""

from collections.abc import Sequence

import numpy as np
import sentencex
from sklearn.feature_extraction.text import TfidfVectorizer

LANGUAGE = "en"


def split_passages(text: str, sentences_per_passage: int) -> list[str]:
    """Texts of so many sentences, the last of the rest; white space is single."""
    sentences = [
        " ".join(sentence.split())
        for line in text.splitlines()
        if line.strip()
        for sentence in sentencex.segment(LANGUAGE, line)
    ]
    sentences = [sentence for sentence in sentences if sentence]
    starts = range(0, len(sentences), sentences_per_passage)
    return [" ".join(sentences[start : start + sentences_per_passage]) for start in starts]


def tfidf_cosines(question: str, passages: Sequence[str]) -> np.ndarray:
    """Cosines float64 [N] in 0 to 1 of each passage with the question; 0 where they share no word."""
    vectorizer = TfidfVectorizer()
    words_of = vectorizer.build_analyzer()
    if not any(words_of(passage) for passage in passages):
        return np.zeros(len(passages))  # which scikit-learn refuses
    vectors = vectorizer.fit_transform(passages)
    return np.clip((vectors @ vectorizer.transform([question]).T).toarray()[:, 0], 0.0, 1.0)


def tfidf_probabilities(cosines: np.ndarray) -> np.ndarray:
    """p_tfidf(p|q) [N]: shares of the sum; even where all are 0."""
    total = cosines.sum()
    return cosines / total if total > 0 else np.full(len(cosines), 1.0 / max(1, len(cosines)))
