"""From a question to passages: search engines, pages fetched behind a guard, snapshots of both, and passages.

This file needs no module of the extra `web`: documents of an index are passages too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replug.config.errors import require_extra
from replug.models.ensemble import Retrieved, document_weights


def require_web(what: str) -> None:
    """Raise UserError if a module of the extra `web` is missing. Callers ask before they import web/evidence.py."""
    modules = ("trafilatura", "lxml_html_clean", "charset_normalizer", "protego", "sentencex", "sklearn", "httpcore")
    require_extra("web", *modules, what=what)


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
