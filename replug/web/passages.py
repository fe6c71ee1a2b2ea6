"""Passages of pages and of a corpus's documents, ordered by TF-IDF. Nothing here uses the network.

A passage is up to six sentences (Lazaridou et al. 2022, section 3.1). p_tfidf(p|q) is a passage's share of the sum of
TF-IDF cosines over the kept passages, not a softmax; document frequencies count the question's passages.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replug.models.ensemble import Retrieved, document_weights

SENTENCES_PER_PASSAGE = 6
MAX_PASSAGES = 50  # kept for a question, the nearest (section 3.3)
# Sentence splitting takes quadratic time, so pieces have at most 500 characters: the rest of a line, or up to the last
# end of a sentence, or to white space.
PIECE = re.compile(r"\S.{0,499}$|\S.{0,498}[.!?](?=\s)|\S.{0,499}(?=\s)|\S.{0,499}")
MAX_PASSAGE_BYTES = 2048  # some 500 tokens of English; a tokenizer of bytes makes no more tokens than bytes


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences of one page, or a document.

    `fetched` is the ISO date of the page, None for a local corpus; `rank` is the page's rank in the search results.
    `cosine` is the similarity to the question: either of TF-IDF vectors, with `probability` = p_tfidf(p|q), or the
    retriever's, with `probability` the softmax of the similarities (REPLUG, section 3.2).
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
    """The passages for a question: best cosine first, ties by rank, then by position.

    `failures` counts failed pages and refused searches by reason. `pages` are the texts of the pages, in the engine's
    order.
    """

    passages: tuple[Passage, ...]
    failures: Mapping[str, int]
    pages: tuple[str, ...] = ()


def passages_of_documents(documents: Sequence[Retrieved], temperature: float = 1.0) -> list[Passage]:
    """Return retrieved documents as whole passages, in the given order, best first."""
    weights = document_weights([document.similarity for document in documents], temperature).tolist()
    return [
        Passage(one.text, f"document:{one.id}", "", None, rank, one.similarity, weight, one.id)
        for rank, (one, weight) in enumerate(zip(documents, weights, strict=True), start=1)
    ]


def first_passages(passages: Sequence[Passage], k: int) -> list[Passage]:
    """Return the first `k` with probabilities normalised to sum to 1; equal if all are 0."""
    kept = passages[:k]
    total = sum(passage.probability for passage in kept)
    return [replace(passage, probability=passage.probability / total if total else 1 / len(kept)) for passage in kept]


def found_in_documents(question: str, documents: Sequence[Retrieved], max_passages: int) -> FoundEvidence:
    """Return the passages nearest to a question, cut from retrieved documents (best first)."""
    passages = passages_of_documents(documents)
    first = {passage.text: passage for passage in reversed(passages)}
    whole = [passage for passage in passages if first[passage.text] is passage]
    failures = Counter(duplicate=len(documents) - len(whole), no_results=int(not documents))
    return nearest_passages(question, whole, max_passages, +failures)


def nearest_passages(question: str, whole: Sequence[Passage], most: int, failures: Mapping[str, int]) -> FoundEvidence:
    """Cut whole pages or documents into passages, and keep the `most` nearest to the question by TF-IDF."""
    texts = tuple(one.text for one in whole)
    parts = [replace(one, text=text) for one in whole for text in split_passages(one.text, SENTENCES_PER_PASSAGE)]
    if not parts:
        return FoundEvidence((), dict(sorted(failures.items())), texts)
    cosines = tfidf_cosines(question, [part.text for part in parts])
    best = np.argsort(-cosines, kind="stable")[:most]  # stable: ties by rank, then position
    nearest = zip(best.tolist(), cosines[best].tolist(), tfidf_probabilities(cosines[best]).tolist(), strict=True)
    passages = tuple(replace(parts[row], cosine=cosine, probability=share) for row, cosine, share in nearest)
    return FoundEvidence(passages, dict(sorted(failures.items())), texts)


def split_passages(text: str, sentences_per_passage: int) -> list[str]:
    """Return passages of at most `sentences_per_passage` sentences and MAX_PASSAGE_BYTES, with single spaces."""
    import sentencex

    sentences = [
        " ".join(sentence.split())
        for line in text.splitlines()
        for piece in PIECE.findall(line)
        for sentence in sentencex.segment("en", piece)
    ]
    passages: list[str] = []
    num = sentences_per_passage  # sentences in the last passage
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
    """Return p_tfidf(p|q) [N]: shares of the sum; equal if all are 0."""
    total = cosines.sum()
    return cosines / total if total > 0 else np.full(len(cosines), 1.0 / max(1, len(cosines)))
