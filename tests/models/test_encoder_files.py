"""Encoders from folders and the hub: each has the vectors of sentence-transformers or transformers, or is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, DPRContextEncoder, DPRQuestionEncoder, PreTrainedModel

from replug.config.choices import Similarity, TrainedSide
from replug.config.errors import UserError
from replug.config.schema import RetrieverConfig
from replug.index_workers.version_store import weights_sha256
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.encoder_side import require_known
from replug.models.packaged import write_stand_in_encoder
from replug.planning.model_sizes import encoder_size, retriever_size
from tests.support.encoder_folders import (
    ARCHITECTURES,
    write_chain,
    write_dpr,
    write_dpr_pair,
    write_encoder,
    write_json,
    write_static,
)

TEXTS = ["w1", " ".join(f"w{n}" for n in range(2, 22)), "w5 w6 W7 w8 w9", " ".join(f"w{n % 50}" for n in range(90))]
PROMPTS = {"query": "query : ", "passage": "passage : w3 "}
LAST = {"pooling_mode": "lasttoken"}
MEAN = {"pooling_mode_mean_tokens": True}
CHAINS: dict[str, tuple[dict, list[str]]] = {
    "cls": ({"pooling_mode_cls_token": True}, []),
    "sqrt": ({"pooling_mode_mean_sqrt_len_tokens": True}, ["Normalize"]),
    "several": ({"pooling_mode": ["mean", "cls", "max"]}, ["Dense"]),
    "without the prompt": ({"pooling_mode": ["weightedmean", "mean", "cls"], "include_prompt": False}, []),
    "dense": (MEAN, ["Dropout", "Dense", "Normalize"]),
    "norm": (MEAN, ["LayerNorm", "Dense"]),
}
WORDS = ["mida furo", "furo", "x"]  # of the stand-in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_encoder(tmp_path / "a", "bert")
    return tmp_path / "a"


def require_equal_to_theirs(folder: Path, ours: Encoder) -> None:
    model = SentenceTransformer(str(folder), device="cpu")
    for name, encode in (("query", ours.encode_query), ("passage", ours.encode_document)):
        expected = model.encode(TEXTS, batch_size=2, normalize_embeddings=ours.similarity == "cosine", prompt_name=name)
        np.testing.assert_allclose(encode(TEXTS), expected, atol=1e-5, rtol=1e-5)


def trained_a_step(encoder: Encoder) -> None:
    encoder.encode_with_gradient(encoder.token_ids(TEXTS))[:, 0].sum().backward()
    torch.optim.SGD([weight for weight in encoder.parameters() if weight.requires_grad], lr=0.05).step()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_the_vectors_of_sentence_transformers(tmp_path: Path, architecture: str) -> None:
    write_encoder(tmp_path / "a", architecture)
    write_chain(tmp_path / "a", LAST if architecture == "qwen3" else MEAN, ["Dense"], PROMPTS)
    encoder = Encoder(str(tmp_path / "a"))
    assert (encoder.max_tokens, encoder.dim) == (32, 12)
    require_equal_to_theirs(tmp_path / "a", encoder)

    trained_a_step(encoder)
    encoder.save(tmp_path / "saved")
    require_equal_to_theirs(tmp_path / "saved", encoder)
    torch.testing.assert_close(Encoder(str(tmp_path / "saved")).encode_query(TEXTS), encoder.encode_query(TEXTS))


@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_has_the_vectors_of_sentence_transformers_and_stays_itself(
    tmp_path: Path, folder: Path, chain: str
) -> None:
    pooling, layers = CHAINS[chain]
    write_chain(folder, pooling, layers, PROMPTS, similarity_fn_name="dot")
    encoder = Encoder(str(folder))
    assert encoder.similarity == "dot"
    require_equal_to_theirs(folder, encoder)
    half = Encoder(str(folder)).to(torch.bfloat16).encode(TEXTS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, encoder.encode(TEXTS), atol=0.2, rtol=0)

    behind = [weight for module in encoder.sides["document"].modules[1:] for weight in module.parameters()]
    before = [weight.clone() for weight in behind]
    trained_a_step(encoder)
    assert all(not torch.equal(old, new) for old, new in zip(before, behind, strict=True))
    encoder.save(tmp_path / "saved")
    again = Encoder(str(tmp_path / "saved"))
    assert (again.pooling, again.similarity, again.prompt("query")) == (encoder.pooling, "dot", "query : ")
    torch.testing.assert_close(again.encode_document(TEXTS), encoder.encode_document(TEXTS))
    require_equal_to_theirs(tmp_path / "saved", again)


@pytest.mark.parametrize("layers", [[], ["Dense", "Normalize"]], ids=str)
def test_a_static_encoder_is_that_of_sentence_transformers_to_the_bit_untuned_and_tuned(
    tmp_path: Path, layers: list[str]
) -> None:
    write_static(tmp_path / "a", PROMPTS, layers)
    encoder = Encoder(str(tmp_path / "a"), max_tokens=20).to(torch.bfloat16)  # the table stays float32
    require_equal_to_theirs(tmp_path / "a", Encoder(str(tmp_path / "a")))
    trained_a_step(encoder)
    encoder.save(tmp_path / "saved")
    theirs, again = SentenceTransformer(str(tmp_path / "saved"), device="cpu"), Encoder(str(tmp_path / "saved"))
    assert (again.max_tokens, again.pooling) == (20, encoder.pooling)
    for name, encode in (("query", again.encode_query), ("passage", again.encode_document)):
        expected = theirs.encode(TEXTS, prompt_name=name, convert_to_tensor=True, batch_size=2)
        assert torch.equal(encode(TEXTS[::-1]).flip(0), encode(TEXTS))
        torch.testing.assert_close(encode(TEXTS), expected)
        assert layers or torch.equal(encode(TEXTS), expected)
    query = again.sides["query"]
    assert [query.is_cut("w1 " * 18), query.is_cut("w1 " * 19)] == [False, True]  # the prompt has two
    with torch.no_grad():
        torch.testing.assert_close(again.encode_with_gradient(again.token_ids(TEXTS)), again.encode_document(TEXTS))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_causal_encoder_has_the_same_vectors_whatever_the_batch_and_the_side_of_padding(
    tmp_path: Path, side: str
) -> None:
    write_encoder(tmp_path, "qwen3", padding_side=side)
    write_chain(tmp_path, LAST, ["Normalize"], PROMPTS)
    encoder = Encoder(str(tmp_path))
    assert [row[-1] for row in encoder.token_ids(TEXTS)] == [2] * len(TEXTS)  # cut before the end token, not through it
    require_equal_to_theirs(tmp_path, encoder)
    alone = torch.cat([encoder.encode([text]) for text in TEXTS])
    torch.testing.assert_close(encoder.encode(TEXTS), alone, atol=1e-6, rtol=0)


def test_a_folder_in_lower_case_with_a_limit_and_a_transformer_of_its_own_place(tmp_path: Path) -> None:
    write_encoder(tmp_path / "a/0_BERT", "bert")
    write_chain(tmp_path / "a", MEAN, [], PROMPTS)
    modules = json.loads((tmp_path / "a/modules.json").read_text())
    write_json(tmp_path / "a/modules.json", [{**modules[0], "path": "0_BERT"}, modules[1]])
    write_json(tmp_path / "a/0_BERT/sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    encoder = Encoder(str(tmp_path / "a"))
    assert (encoder.max_tokens, encoder.similarity) == (9, "cosine")
    assert Encoder(str(tmp_path / "a"), max_tokens=40).max_tokens == 40  # what the position table holds
    np.testing.assert_array_equal(encoder.token_ids(["W7 w8"])[0], encoder.token_ids(["w7 W8"])[0])
    require_equal_to_theirs(tmp_path / "a", encoder)
    encoder.save(tmp_path / "saved")
    require_equal_to_theirs(tmp_path / "saved", Encoder(str(tmp_path / "saved")))


def test_prepared_token_ids_hold_the_documents_prompt(folder: Path, tmp_path: Path) -> None:
    plain = Encoder(str(folder))
    own = Encoder(str(folder), query_prompt="query : ", document_prompt="passage : ")
    assert own.token_rule.fingerprint != plain.token_rule.fingerprint
    torch.testing.assert_close(own.encode_document(TEXTS), plain.encode([f"passage : {text}" for text in TEXTS]))
    own.save(tmp_path / "saved")
    torch.testing.assert_close(Encoder(str(tmp_path / "saved")).encode_query(TEXTS), own.encode_query(TEXTS))


def test_dot_is_that_of_the_vectors_as_they_are_unless_the_folder_has_dot_of_unit_vectors(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    write_chain(tmp_path, MEAN, ["Dense", "Normalize"], similarity_fn_name="cosine")
    cosine, dot = Encoder(str(tmp_path)).encode(TEXTS), Encoder(str(tmp_path), "dot").encode(TEXTS)
    assert not torch.allclose(dot.norm(dim=-1), torch.ones(len(TEXTS)))
    torch.testing.assert_close(torch.nn.functional.normalize(dot, dim=-1), cosine)
    write_chain(tmp_path, MEAN, ["Dense", "Normalize"], similarity_fn_name="dot")
    unit = Encoder(str(tmp_path))
    assert (unit.similarity, unit.pooling) == ("dot", "mean, Dense(12, Tanh), Normalize")
    unit.save(tmp_path / "saved")
    torch.testing.assert_close(Encoder(str(tmp_path / "saved"), "dot").encode(TEXTS), cosine)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_folder_that_cuts_its_vectors_does_so_here_and_where_it_is_saved(
    tmp_path: Path, folder: Path, similarity: str
) -> None:
    write_chain(folder, MEAN, ["Normalize"] if similarity == "cosine" else [], similarity_fn_name=similarity)
    _set(MODEL, truncate_dim=5)(folder)
    ours = Encoder(str(folder))
    assert (ours.dim, ours.dims) == (5, 5)
    ours.split()
    ours.save(tmp_path / "saved")
    for place in (folder, tmp_path / "saved"):
        theirs = SentenceTransformer(str(place), device="cpu")
        expected = theirs.encode_query(TEXTS, normalize_embeddings=similarity == "cosine")
        assert expected.shape == (len(TEXTS), 5)
        np.testing.assert_allclose(Encoder(str(place)).encode_query(TEXTS), expected, atol=1e-5)
    assert Encoder(str(folder), dims=ours.width).dim == ours.width


NAMED_PROMPTS = {  # as published, and what each gives to a query and a document
    "nomic": ({"search_query": "w1 ", "search_document": "w2 ", "clustering": "w3 "}, ("w1 ", "w2 ")),
    "stella": ({"s2p_query": "w1 ", "s2s_query": "w2 "}, ("w1 ", "")),
    "gemma": ({"query": "w1 ", "document": "w2 ", "Retrieval-query": "w3 "}, ("w1 ", "w2 ")),
    "other": ({"STS": "w1 ", "Classification": "w2 "}, ("", "")),
}


@pytest.mark.parametrize("name", NAMED_PROMPTS)
def test_prompts_of_other_names_are_taken_or_named(folder: Path, name: str, caplog: Any) -> None:
    prompts, expected = NAMED_PROMPTS[name]
    write_chain(folder, MEAN, [])
    _set(MODEL, prompts=prompts)(folder)
    ours = Encoder(str(folder))
    assert (ours.prompt("query"), ours.prompt("document")) == expected
    said = "has prompts (STS, Classification), and none is known to be for queries"
    assert (said in caplog.text) == (name == "other")


def test_texts_that_the_tokenizer_does_not_know_are_named_and_mostly_unknown_ones_refused(caplog: Any) -> None:
    encoder = Encoder("package:minilm")
    thai = ["แม่น้ำไรน์ไหลผ่านเมืองบาเซิลแล้วไหลลงสู่ทะเลเหนือ" * 3, "ขนมปังทำจากแป้งและน้ำและเกลือ" * 4]
    english = ["The Rhine flows through Basel.", "Bread is baked from flour. 😀"]
    require_known(encoder, None, english, "minilm")
    assert not caplog.text
    with pytest.raises(UserError, match="tokenizer of minilm does not know 100% of the tokens of queries"):
        require_known(encoder, None, thai, "minilm")
    require_known(encoder, None, [*english, thai[0]], "minilm")
    assert len(caplog.messages) == 1 and "tokenizer of minilm does not know" in caplog.text


# What is refused ----------------------------------------------------------------------------------------------


def _set(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        before = json.loads(file.read_text()) if file.is_file() else {}
        write_json(file, {**before, **values})

    return change


def _own_code(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*modules[:2], {**modules[2], "type": "custom_st.Dense"}])


def _static_of_another_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder)
    write_static(folder)
    save_file({"embedding.weight": torch.ones(9, 4)}, folder / "model.safetensors")


def _pickled(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


MODEL, TEXT = "config_sentence_transformers.json", "sentence_bert_config.json"
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "own code": (_own_code, "'custom_st.Dense', which is not part of Sentence Transformers"),
    "static table of fewer rows": (_static_of_another_tokenizer, "tokens up to number 66, but its table has 9 rows"),
    "pickle": (_pickled, "no 2_Dense/model.safetensors, the weights of its Dense; pickled weights"),
    "pooling": (_set("1_Pooling/config.json", pooling_mode="attention"), "Invalid pooling mode: 'attention'"),
    "similarity": (_set(MODEL, similarity_fn_name="euclidean"), "retriever.similarity is euclidean"),
    "kind": (_set(MODEL, model_type="SparseEncoder"), "holds a SparseEncoder"),
    "long prompt": (_set(MODEL, prompts={"query": "w1 " * 40}), "retriever.query_prompt: 'w1 .* fills the 32 tokens"),
    "expansion": (_set(TEXT, query_length=8), "sets query_length"),
    "key": (_set(TEXT, reverse=True), "cannot load .*reverse"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_encoder_of_one_vector_is_refused_by_its_folder(folder: Path, case: str) -> None:
    change, message = REFUSED[case]
    write_chain(folder, MEAN, ["Dense"])
    change(folder)
    with pytest.raises(UserError, match=message):
        Encoder(str(folder))


# DPR and pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DPRContextEncoder, DPRQuestionEncoder])
def test_each_of_dprs_encoders_gives_the_vectors_that_transformers_gives(
    tmp_path: Path, kind: type[PreTrainedModel]
) -> None:
    write_dpr(tmp_path, kind, seed=3)
    model, tokenizer = kind.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).pooler_output[0] for text in WORDS]
    expected = torch.stack(rows)
    encoder = Encoder(str(tmp_path), "dot")
    torch.testing.assert_close(encoder.encode(WORDS), expected, atol=1e-5, rtol=0)

    encoder.save(tmp_path / "saved")  # as every refresh does; from here on it is a BERT as any other
    torch.testing.assert_close(Encoder(str(tmp_path / "saved")).encode(WORDS), expected, atol=1e-5, rtol=0)


@pytest.fixture
def pair(tmp_path: Path) -> RetrieverConfig:
    documents, queries = write_dpr_pair(tmp_path)
    return RetrieverConfig(str(documents), similarity=Similarity.dot, query_path=str(queries), query_prompt="furo ")


def test_each_side_is_read_by_its_own_encoder_and_prompt_and_saved(pair: RetrieverConfig, tmp_path: Path) -> None:
    encoder = load_encoder(pair)
    alone = Encoder(str(pair.query_path), "dot"), Encoder(pair.path, "dot")
    expected = alone[0].encode([f"furo {text}" for text in WORDS]), alone[1].encode(WORDS)
    torch.testing.assert_close(encoder.encode_query(WORDS), expected[0])
    torch.testing.assert_close(encoder.encode_document(WORDS), expected[1])
    with pytest.raises(UserError, match="use encode_query or encode_document"):
        encoder.encode(WORDS)
    encoder.save(tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    for again in (load_encoder(pair, tmp_path / "saved"), theirs):
        np.testing.assert_allclose(again.encode_query(WORDS), expected[0], atol=1e-5)
        np.testing.assert_allclose(again.encode_document(WORDS), expected[1], atol=1e-5)
    assert theirs.similarity_fn_name == "dot"
    [found] = EncoderRetriever(encoder, WORDS).retrieve(["x"], 3)
    similarities = (expected[1] @ expected[0][2]).sort(descending=True)
    np.testing.assert_allclose([one.similarity for one in found], similarities.values, rtol=1e-4)
    assert [one.id for one in found] == [str(place) for place in similarities.indices.tolist()]

    whole = weights_sha256(tmp_path / "saved")
    with torch.no_grad():
        encoder.backbones[1].get_input_embeddings().weight.add_(1)
    encoder.save(tmp_path / "saved")
    assert weights_sha256(tmp_path / "saved") != whole  # other queries are another retriever


def test_documents_trained_alone_make_a_pair_whose_queries_begin_as_they_were(pair: RetrieverConfig) -> None:
    config = RetrieverConfig("stand_in", train=TrainedSide.documents)
    encoder = load_encoder(config)
    torch.testing.assert_close(encoder.encode_query(WORDS), encoder.encode_document(WORDS))
    assert len(encoder.state_dict()) == 2 * len(Encoder("stand_in").state_dict())
    assert retriever_size(config).parameters == 2 * encoder_size("stand_in").parameters
    assert retriever_size(pair).parameters == 2 * encoder_size(pair.path).parameters


def test_encoders_of_two_retrievers_are_refused(pair: RetrieverConfig, tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path / "other", hidden_size=16)
    with pytest.raises(UserError, match=r"retriever.query_path: vectors of queries have 16 numbers, .* documents 32"):
        Encoder(pair.path, query_path=str(tmp_path / "other"))
