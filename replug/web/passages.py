"""Passages of pages and of a corpus's documents, ordered by TF-IDF. Nothing here reaches for the web.

A passage is up to six sentences (Lazaridou et al. 2022, section 3.1). p_tfidf(p|q) is the TF-IDF cosine over the sum of
the cosines of the passages that are kept, not a softmax; documents are the passages of this question.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replug.models.ensemble import Retrieved, document_weights

SENTENCES_PER_PASSAGE = 6
# At most 500 characters are cut into sentences at once, since the time grows with their square: the rest of a
# line, or up to the last end of a sentence, or to white space.
PIECE = re.compile(r"\S.{0,499}$|\S.{0,498}[.!?](?=\s)|\S.{0,499}(?=\s)|\S.{0,499}")
MAX_PASSAGE_BYTES = 2048  # some 500 tokens of English; a tokenizer of bytes makes no more tokens than bytes


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences of one page, or a document.

    `fetched` is the ISO date on which the page was kept, None for a local corpus; `rank` is its page's in the engine's
    results. `cosine` is the similarity to the question: of TF-IDF vectors with `probability` = p_tfidf(p|q), the share
    of the cosines' sum; or a retriever's with `probability` the softmax of the similarities (REPLUG, section 3.2).
    """

    text: str
    url: str
    title: str
    fetched: str | None
    rank: int
    cosine: float
    probability: float
    doc_id: str | None = None


@dataclass(frozen=True, slots=True)
class FoundEvidence:
    """The passages for a question: best cosine first, ties by rank, then by place.

    `failures` counts, by reason, pages that gave nothing and searches that an engine refused. `pages` are the texts
    that passages are cut from, in the engine's order.
    """

    passages: tuple[Passage, ...]
    failures: Mapping[str, int]
    pages: tuple[str, ...] = ()


def passages_of_documents(documents: Sequence[Retrieved], temperature: float = 1.0) -> list[Passage]:
    """Return retrieved documents, each as a whole passage, the most similar first."""
    weights = document_weights([document.similarity for document in documents], temperature).tolist()
    return [
        Passage(one.text, f"document:{one.id}", "", None, rank, one.similarity, weight, one.id)
        for rank, (one, weight) in enumerate(zip(documents, weights, strict=True), start=1)
    ]


def first_passages(passages: Sequence[Passage], k: int) -> list[Passage]:
    """Return the first `k` with weights that sum to 1: shares of theirs, equal if these are all 0."""
    kept = passages[:k]
    total = sum(passage.probability for passage in kept)
    return [replace(passage, probability=passage.probability / total if total else 1 / len(kept)) for passage in kept]


def found_in_documents(question: str, documents: Sequence[Retrieved], max_passages: int) -> FoundEvidence:
    """Return the passages of a corpus's documents, the most similar of which come first."""
    passages = passages_of_documents(documents)
    first = {passage.text: passage for passage in reversed(passages)}
    whole = [passage for passage in passages if first[passage.text] is passage]
    failures = Counter(duplicate=len(documents) - len(whole), no_results=int(not documents))
    return nearest_passages(question, whole, max_passages, +failures)


def nearest_passages(question: str, whole: Sequence[Passage], most: int, failures: Mapping[str, int]) -> FoundEvidence:
    """Cut whole pages or documents into passages, and keep those nearest to the question by TF-IDF."""
    texts = tuple(one.text for one in whole)
    parts = [replace(one, text=text) for one in whole for text in split_passages(one.text, SENTENCES_PER_PASSAGE)]
    if not parts:
        return FoundEvidence((), dict(sorted(failures.items())), texts)
    cosines = tfidf_cosines(question, [part.text for part in parts])
    best = np.argsort(-cosines, kind="stable")[:most]  # stable: by rank, then place
    nearest = zip(best.tolist(), cosines[best].tolist(), tfidf_probabilities(cosines[best]).tolist(), strict=True)
    passages = tuple(replace(parts[row], cosine=cosine, probability=share) for row, cosine, share in nearest)
    return FoundEvidence(passages, dict(sorted(failures.items())), texts)


def split_passages(text: str, sentences_per_passage: int) -> list[str]:
    """Return texts of at most `sentences_per_passage` sentences and MAX_PASSAGE_BYTES; white space is single."""
    import sentencex

    sentences = [
        " ".join(sentence.split())
        for line in text.splitlines()
        for piece in PIECE.findall(line)
        for sentence in sentencex.segment("en", piece)
    ]
    passages: list[str] = []
    num = sentences_per_passage  # sentences of the last passage
    for sentence in filter(None, sentences):
        longer = f"{passages[-1]} {sentence}" if num < sentences_per_passage else ""
        if longer and len(longer.encode(errors="replace")) <= MAX_PASSAGE_BYTES:
            passages[-1], num = longer, num + 1
        else:
            passages.append(sentence)
            num = 1
    return passages


def tfidf_cosines(question: str, passages: Sequence[str]) -> np.ndarray:
    """Return the cosine [N], float64 in 0 to 1, of each passage with the question; 0 if they share no word."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer()
    words_of = vectorizer.build_analyzer()
    if not any(words_of(passage) for passage in passages):
        return np.zeros(len(passages))  # scikit-learn refuses passages without words
    vectors = vectorizer.fit_transform(passages)
    return np.clip((vectors @ vectorizer.transform([question]).T).toarray()[:, 0], 0.0, 1.0)


def tfidf_probabilities(cosines: np.ndarray) -> np.ndarray:
    """Return p_tfidf(p|q) [N]: shares of the sum; equal ones if all are 0."""
    total = cosines.sum()
    return cosines / total if total > 0 else np.full(len(cosines), 1.0 / max(1, len(cosines)))
