"""Passages in a retriever's order, with its weights."""

import numpy as np
import pytest

from replug.data.sources.stand_in_texts import stand_in_vocabulary
from replug.models.encoder import Encoder
from replug.models.ensemble import Retrieved
from replug.models.packaged import resolve_encoder_path
from replug.web.dense_ranking import first_passages, passages_of_documents, rank_densely
from replug.web.records import Passage


def passages(*texts: str, probability: float = 0.25) -> list[Passage]:
    return [Passage(text, f"u{row}", "t", "2026-01-01", row, 0.1, probability) for row, text in enumerate(texts, 1)]


def test_passages_are_ordered_and_weighed_by_similarity():
    topics = [" ".join(topic) for topic in stand_in_vocabulary()[:3]]
    encoder, question = Encoder(resolve_encoder_path("stand_in")), topics[2][:20]
    ranked = rank_densely(encoder, question, passages(*topics))
    vectors, query = encoder.encode(topics).numpy(), encoder.encode([question]).numpy()[0]
    expected = sorted((float(vector @ query), row) for row, vector in enumerate(vectors, 1))[::-1]
    assert [one.rank for one in ranked] == [row for _, row in expected]
    similarities = np.array([similarity for similarity, _ in expected])
    np.testing.assert_allclose([one.cosine for one in ranked], similarities, atol=1e-5)
    np.testing.assert_allclose(
        [one.probability for one in ranked], np.exp(similarities) / np.exp(similarities).sum(), atol=1e-5
    )
    assert all(one.url == f"u{one.rank}" and one.fetched == "2026-01-01" for one in ranked)
    assert rank_densely(encoder, question, []) == []


def test_documents_are_passages_that_weigh_by_their_similarity():
    found = passages_of_documents([Retrieved("a", np.log(3.0), "x"), Retrieved("b", 0.0, "y")])
    assert [(one.doc_id, one.url, one.rank, one.fetched) for one in found] == [
        ("x", "document:x", 1, None),
        ("y", "document:y", 2, None),
    ]
    assert [one.probability for one in found] == pytest.approx([0.75, 0.25])
    assert passages_of_documents([]) == []


def test_the_first_passages_share_what_they_have_together():
    kept = first_passages([*passages("a", probability=0.3), *passages("b", probability=0.1), *passages("c")], 2)
    assert [one.probability for one in kept] == pytest.approx([0.75, 0.25])
    assert [one.probability for one in first_passages(passages("a", "b", probability=0.0), 2)] == [0.5, 0.5]
    assert first_passages([], 3) == []
