"""Encoders of sentence-transformers: each architecture and chain gives the vectors that they give, or is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from replug.config.errors import UserError
from replug.data.tokenizing import ids_of_texts, load_plain
from replug.models.encoder import Encoder
from replug.models.packaged import resolve_encoder_path
from tests.support.encoder_folders import ARCHITECTURES, write_chain, write_encoder, write_json

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["w1", " ".join(f"w{n}" for n in range(2, 22)), "w5 w6 W7 w8 w9", " ".join(f"w{n % 50}" for n in range(90))]
PROMPTS = {"query": "query : ", "passage": "passage : w3 "}
LAST = {"pooling_mode": "lasttoken"}
MEAN = {"pooling_mode_mean_tokens": True}
CHAINS: dict[str, tuple[dict, list[str]]] = {
    "cls": ({"pooling_mode_cls_token": True}, []),
    "max": ({"pooling_mode_max_tokens": True}, []),
    "sqrt": ({"pooling_mode_mean_sqrt_len_tokens": True}, ["Normalize"]),
    "weighted": ({"pooling_mode_weightedmean_tokens": True}, []),
    "last": (LAST, ["Normalize"]),
    "several": ({"pooling_mode": ["mean", "cls", "max"]}, ["Dense"]),
    "flags": ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, []),
    "without the prompt": ({"pooling_mode": ["weightedmean", "mean", "cls"], "include_prompt": False}, []),
    "dense": (MEAN, ["Dropout", "Dense", "Normalize"]),
    "norm": (MEAN, ["LayerNorm", "Dense", "Dense"]),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_encoder(folder, "bert")
    return folder


def require_equal_to_theirs(folder: Path, ours: Encoder) -> None:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    is_cosine = ours.similarity == "cosine"
    sides: list[tuple[str, Callable[[list[str]], Tensor]]] = [
        ("query", ours.encode_query),
        ("passage", ours.encode_document),
    ]
    for name, encode in sides:
        expected = model.encode(TEXTS, batch_size=2, normalize_embeddings=is_cosine, prompt_name=name)
        np.testing.assert_allclose(encode(TEXTS), expected, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(ours.encode(TEXTS, prompt_name=name), expected, atol=1e-5, rtol=1e-5)


def trained_a_step(encoder: Encoder) -> None:
    prompt = encoder.prompts.document
    encoder.encode_with_gradient(encoder.token_ids(TEXTS, prompt), prompt=prompt)[:, 0].sum().backward()
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
    tmp_path: Path, bert: Path, chain: str
) -> None:
    pooling, layers = CHAINS[chain]
    shutil.copytree(bert, tmp_path / "a")
    write_chain(tmp_path / "a", pooling, layers, PROMPTS, similarity_fn_name="dot")
    encoder = Encoder(str(tmp_path / "a"))
    assert encoder.similarity == "dot"
    require_equal_to_theirs(tmp_path / "a", encoder)

    before = [weight.clone() for weight in encoder.head.parameters()]
    trained_a_step(encoder)
    assert all(not torch.equal(old, new) for old, new in zip(before, encoder.head.parameters(), strict=True))
    encoder.save(tmp_path / "saved")
    again = Encoder(str(tmp_path / "saved"))
    assert (again.pooling, again.similarity, again.prompts.query) == (encoder.pooling, "dot", "query : ")
    torch.testing.assert_close(again.encode_document(TEXTS), encoder.encode_document(TEXTS))
    require_equal_to_theirs(tmp_path / "saved", again)


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


def test_a_folder_in_lower_case_with_a_limit_reads_texts_so(tmp_path: Path) -> None:
    write_encoder(tmp_path / "a", "bert")
    write_chain(tmp_path / "a", MEAN, [], PROMPTS)
    write_json(tmp_path / "a/sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    encoder = Encoder(str(tmp_path / "a"))
    assert (encoder.max_tokens, encoder.similarity) == (9, "cosine")
    assert Encoder(str(tmp_path / "a"), max_tokens=40).max_tokens == 40  # what the position table holds
    np.testing.assert_array_equal(encoder.token_ids(["W7 w8"])[0], encoder.token_ids(["w7 W8"])[0])
    require_equal_to_theirs(tmp_path / "a", encoder)
    encoder.save(tmp_path / "saved")
    require_equal_to_theirs(tmp_path / "saved", Encoder(str(tmp_path / "saved")))


def test_the_transformer_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_encoder(tmp_path / "a/0_BERT", "bert")
    write_chain(tmp_path / "a", MEAN, [], PROMPTS)
    modules = json.loads((tmp_path / "a/modules.json").read_text())
    write_json(tmp_path / "a/modules.json", [{**modules[0], "path": "0_BERT"}, modules[1]])
    write_json(tmp_path / "a/config.json", {})  # what `retriever.path` looks for
    require_equal_to_theirs(tmp_path / "a", Encoder(str(tmp_path / "a")))


def test_weights_in_bfloat16_have_close_vectors(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    write_chain(tmp_path, MEAN, ["LayerNorm", "Dense"])
    exact = Encoder(str(tmp_path)).encode(TEXTS)
    half = Encoder(str(tmp_path)).to(torch.bfloat16).encode(TEXTS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=0.05, rtol=0)


def test_prepared_token_ids_hold_the_documents_prompt(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    plain = Encoder(str(tmp_path))
    own = Encoder(str(tmp_path), query_prompt="query : ", document_prompt="passage : ")
    rule = own.token_rule
    expected = own.token_ids(TEXTS, "passage : ")
    for found, row in zip(ids_of_texts(load_plain(rule.tokenizer), rule, TEXTS), expected, strict=True):
        np.testing.assert_array_equal(found, row)
    assert rule.fingerprint != plain.token_rule.fingerprint
    torch.testing.assert_close(own.encode_document(TEXTS), plain.encode([f"passage : {text}" for text in TEXTS]))
    own.save(tmp_path / "saved")
    torch.testing.assert_close(Encoder(str(tmp_path / "saved")).encode_query(TEXTS), own.encode_query(TEXTS))


def _set(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        before = json.loads(file.read_text()) if file.is_file() else {}
        write_json(file, {**before, **values})

    return change


def _retype(kind: str, place: int = 2) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        modules[place]["type"] = kind
        write_json(folder / "modules.json", modules)

    return change


def _pickled(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


MODEL, TEXT = "config_sentence_transformers.json", "sentence_bert_config.json"
REFUSED: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "router",
        _retype("sentence_transformers.models.Router"),
        r"modules.json lists sentence_\S+Router, which replug",
    ),
    ("own code", _retype("custom_st.Dense"), "modules.json lists custom_st.Dense, which replug cannot read"),
    ("no pooling", _retype("sentence_transformers.models.Dense", 1), "expected Transformer and Pooling first"),
    ("two poolings", _retype("sentence_transformers.models.Pooling"), "lists Pooling after Pooling"),
    ("pickle", _pickled, "no 2_Dense/model.safetensors, the weights of its Dense; pickled ones"),
    ("pooling", _set("1_Pooling/config.json", pooling_mode="attention"), "pools by attention; expected cls, max"),
    ("width", _set("1_Pooling/config.json", word_embedding_dimension=8), "vectors of 8 numbers, but the model has 16"),
    (
        "activation",
        _set("2_Dense/config.json", activation_function="torch.nn.Softmax"),
        "activation_function torch.nn",
    ),
    ("own activation", _set("2_Dense/config.json", activation_function="os.Tanh"), "activation_function os.Tanh"),
    ("residual", _set("2_Dense/config.json", use_residual=True), "sets use_residual"),
    ("tokens", _set("2_Dense/config.json", module_input_name="token_embeddings"), "module_input_name token_embeddings"),
    ("dense width", _set("2_Dense/config.json", in_features=7), "takes vectors of 7 numbers, but 16 come before it"),
    ("dense weights", _set("2_Dense/config.json", out_features=7), r"2_Dense/model.safetensors holds .*\(12, 16\)"),
    ("key", _set("2_Dense/config.json", rank=7), "2_Dense/config.json sets rank, which replug does not know"),
    ("similarity", _set(MODEL, similarity_fn_name="euclidean"), "retriever.similarity: .* says euclidean"),
    ("kind", _set(MODEL, model_type="SparseEncoder"), "holds a SparseEncoder"),
    ("default prompt", _set(MODEL, default_prompt_name="x"), "default_prompt_name 'x', but no such prompt"),
    ("long prompt", _set(MODEL, prompts={"query": "w1 " * 40}), "retriever.query_prompt: 'w1 .* fills the 32 tokens"),
    ("task", _set(TEXT, transformer_task="fill-mask"), "sets transformer_task to fill-mask"),
    ("expansion", _set(TEXT, query_length=8), "sets query_length to 8"),
    ("options", _set(TEXT, config_args={"is_causal": False}), "sets config_args to {'is_causal': False}"),
    ("text key", _set(TEXT, reverse=True), "sentence_bert_config.json sets reverse"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_would_change_the_vectors_is_refused_by_module_and_file(
    tmp_path: Path, bert: Path, change: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(bert, folder := tmp_path / "a")
    write_chain(folder, MEAN, ["Dense"])
    change(folder)
    with pytest.raises(UserError, match=message):
        Encoder(str(folder))


def test_a_causal_model_that_pools_by_its_first_token_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "qwen3")
    write_chain(tmp_path, {"pooling_mode": "cls"})
    with pytest.raises(UserError, match="reads from left to right as language models do and pools by cls"):
        Encoder(str(tmp_path))


def test_minilm_with_prompts_has_the_vectors_of_sentence_transformers() -> None:
    path = resolve_encoder_path("package:minilm")
    encoder = Encoder(path, query_prompt="query: ", document_prompt="passage: ")
    model = sentence_transformers.SentenceTransformer(path, device="cpu", prompts=PROMPTS)
    texts = ["Nantes lies on the Loire.", "It rained." * 200]
    np.testing.assert_allclose(encoder.encode_query(texts), model.encode(texts, prompt="query: "), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_document(texts), model.encode(texts, prompt="passage: "), atol=1e-5)


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
