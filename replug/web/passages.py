"""Passages in a retriever's order, which needs no module of the extra `web`: an index's documents are passages too.

The retriever may be the one that was tuned to the LM. `Passage.cosine` is its similarity, and `probability` the softmax
of the similarities (REPLUG, section 3.2) at a temperature.
"""

from collections.abc import Sequence
from dataclasses import replace

from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.ensemble import Retrieved, document_weights
from replug.web.records import Passage


def rank_densely(
    encoder: Encoder, question: str, passages: Sequence[Passage], temperature: float = 1.0
) -> list[Passage]:
    """The passages, the most similar to the question first; equal ones in the order they were given."""
    if not passages:
        return []
    retriever = EncoderRetriever(encoder, [passage.text for passage in passages])
    [found] = retriever.retrieve([question], len(passages))
    return weighed([(passages[int(one.id)], one.similarity) for one in found], temperature)


def passages_of_documents(documents: Sequence[Retrieved], temperature: float = 1.0) -> list[Passage]:
    """Documents that a retriever found, each a whole passage, the most similar first."""
    passages = [
        Passage(one.text, f"document:{one.id}", "", None, rank, one.similarity, 0.0, one.id)
        for rank, one in enumerate(documents, start=1)
    ]
    return weighed([(passage, passage.cosine) for passage in passages], temperature)


def weighed(passages: Sequence[tuple[Passage, float]], temperature: float = 1.0) -> list[Passage]:
    """With these similarities, and their softmax at this temperature as weights."""
    weights = document_weights([similarity for _, similarity in passages], temperature).tolist()
    return [
        replace(passage, cosine=similarity, probability=weight)
        for (passage, similarity), weight in zip(passages, weights, strict=True)
    ]


def first_passages(passages: Sequence[Passage], k: int) -> list[Passage]:
    """The first `k` as if no others had been found: a weight is its share of theirs, even where these are all 0."""
    kept = passages[:k]
    total = sum(passage.probability for passage in kept)
    return [replace(passage, probability=passage.probability / total if total else 1 / len(kept)) for passage in kept]
