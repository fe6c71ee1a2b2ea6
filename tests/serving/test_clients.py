"""Vectors of queries and documents that are embedded apart."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from replug.config.choices import TrainedSide
from replug.config.schema import RetrieverConfig
from replug.models.encoder import Encoder
from replug.train.trained_weights import save_retriever
from tests.support.encoder_folders import write_dpr_pair
from tests.support.serving import TEXTS, ask, service_of
from tests.support.small_index import write_small_index

DIMS = 8


@dataclass(frozen=True)
class Apart:
    """An index, and the vectors [N, D] of TEXTS on either side."""

    root: Path
    query: np.ndarray
    document: np.ndarray


def with_prompts(folder: Path) -> Apart:
    """One encoder, another prompt for each side."""
    encoder = Encoder("stand_in", query_prompt=f"{TEXTS[0]} ", document_prompt=f"{TEXTS[1]} ")
    encoder.save(folder / "encoder")
    plain = Encoder("stand_in")
    query, document = (plain.encode([f"{TEXTS[place]} {text}" for text in TEXTS]).numpy() for place in (0, 1))
    return Apart(write_small_index(folder, TEXTS, str(folder / "encoder")), query, document)


def of_a_pair(folder: Path) -> Apart:
    """Two encoders."""
    documents, queries = map(str, write_dpr_pair(folder))
    Encoder(documents, query_path=queries).save(folder / "pair")
    query, document = (Encoder(path).encode(TEXTS).numpy() for path in (queries, documents))
    return Apart(write_small_index(folder, TEXTS, str(folder / "pair")), query, document)


def of_tuned_queries(folder: Path) -> Apart:
    """A run that tuned queries alone, searched by the first numbers: documents have the encoder of the index."""
    documents, queries = map(str, write_dpr_pair(folder))
    config = RetrieverConfig(documents, train=TrainedSide.query)
    save_retriever(folder / "retriever", Encoder(queries), config, Encoder(documents))
    query, document = (Encoder(path, dims=DIMS).encode(TEXTS).numpy() for path in (queries, documents))
    return Apart(write_small_index(folder, TEXTS, documents, dims=DIMS), query, document)


@pytest.mark.parametrize("make", [with_prompts, of_a_pair, of_tuned_queries])
def test_the_side_must_be_said_and_each_gives_its_own_vectors(make: Callable[[Path], Apart], tmp_path: Path) -> None:
    apart = make(tmp_path)

    async def test(client):
        asked = {"model": "retriever", "input": TEXTS}
        sides = [{**asked, "input_type": side} for side in ("query", "document")]
        return [await client.post("/v1/embeddings", json=body) for body in (asked, *sides)]

    unsaid, query, document = ask(service_of(apart.root), test)
    assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "input_type")
    assert "expected query or document" in unsaid.text
    for found, expected in ((query, apart.query), (document, apart.document)):
        assert found.status_code == 200, found.text
        vectors = np.array([row["embedding"] for row in found.json()["data"]])
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.abs(apart.query - apart.document).max() > 0.01
