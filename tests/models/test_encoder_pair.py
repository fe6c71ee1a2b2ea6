"""A pair of encoders (DPR): each side reads by its own weights and prompt, and the pair stays a pair when saved."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.choices import Similarity, TrainedSide
from replug.config.errors import UserError
from replug.config.schema import RetrieverConfig
from replug.index_workers.version_store import weights_sha256
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.stand_in_encoder import write_stand_in_encoder
from replug.planning.model_sizes import encoder_size, retriever_size
from tests.support.dpr_folders import write_dpr_pair

TEXTS = ["mida furo", "furo", "x"]


@pytest.fixture
def pair(tmp_path: Path) -> RetrieverConfig:
    documents, queries = write_dpr_pair(tmp_path)
    return RetrieverConfig(str(documents), similarity=Similarity.dot, query_path=str(queries), query_prompt="furo ")


def test_each_side_is_read_by_its_own_encoder_and_prompt(pair: RetrieverConfig) -> None:
    encoder = load_encoder(pair)
    alone = Encoder(str(pair.query_path), "dot"), Encoder(pair.path, "dot")
    expected = alone[0].encode([f"furo {text}" for text in TEXTS]), alone[1].encode(TEXTS)
    torch.testing.assert_close(encoder.encode_query(TEXTS), expected[0])
    torch.testing.assert_close(encoder.encode(TEXTS, prompt_name="query"), expected[0])
    torch.testing.assert_close(encoder.encode_document(TEXTS), expected[1])
    with pytest.raises(UserError, match="use encode_query or encode_document"):
        encoder.encode(TEXTS)
    [found] = EncoderRetriever(encoder, TEXTS).retrieve(["x"], 3)
    similarities = (expected[1] @ expected[0][2]).sort(descending=True)
    np.testing.assert_allclose([one.similarity for one in found], similarities.values, rtol=1e-4)
    assert [one.id for one in found] == [str(place) for place in similarities.indices.tolist()]


def test_a_saved_pair_is_loaded_as_one_here_and_as_two_by_sentence_transformers(
    pair: RetrieverConfig, tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = load_encoder(pair)
    encoder.save(tmp_path / "saved")
    again = load_encoder(pair, tmp_path / "saved")
    torch.testing.assert_close(again.encode_query(TEXTS), encoder.encode_query(TEXTS))
    torch.testing.assert_close(again.encode_document(TEXTS), encoder.encode_document(TEXTS))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved/query_encoder"), device="cpu")
    np.testing.assert_allclose(theirs.encode_query(TEXTS), encoder.encode_query(TEXTS), atol=1e-5)

    whole = weights_sha256(tmp_path / "saved")
    with torch.no_grad():
        encoder.of_queries.backbone.get_input_embeddings().weight.add_(1)
    encoder.save(tmp_path / "saved")
    assert weights_sha256(tmp_path / "saved") != whole  # other queries are another retriever


def test_documents_trained_alone_make_a_pair_whose_queries_begin_as_they_were(pair: RetrieverConfig) -> None:
    config = RetrieverConfig("stand_in", train=TrainedSide.documents)
    encoder = load_encoder(config)
    torch.testing.assert_close(encoder.encode_query(TEXTS), encoder.encode_document(TEXTS))
    assert len(encoder.state_dict()) == 2 * len(Encoder("stand_in").state_dict())
    assert retriever_size(config).parameters == 2 * encoder_size("stand_in").parameters
    assert retriever_size(pair).parameters == 2 * encoder_size(pair.path).parameters


def test_encoders_of_two_retrievers_are_refused(pair: RetrieverConfig, tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path / "other", hidden_size=16)
    with pytest.raises(UserError, match=r"retriever.query_path: vectors of queries have 16 numbers, .* documents 32"):
        Encoder(pair.path, query_path=str(tmp_path / "other"))
