import json
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.schema import Config, RetrieverConfig
from replug.models.encoder import Encoder
from replug.models.encoder_files import DocumentEncoder
from replug.planning.model_sizes import encoder_size, head_size, lm_size, retriever_size
from replug.planning.pace import Job, job_of
from replug.planning.training import disk_gb
from tests.support.dpr_folders import write_dpr_pair
from tests.support.encoder_folders import WIDTH, write_chain, write_encoder

PUBLISHED = {  # millions of parameters, as their model cards have them
    "gpt2-xl": 1557.6,
    "bigscience/bloom-7b1": 7069.0,
    "EleutherAI/pythia-6.9b-deduped": 6857.3,
    "meta-llama/Llama-2-7b-hf": 6738.4,
    "meta-llama/Llama-3.1-8B-Instruct": 8030.3,
    "Qwen/Qwen3-0.6B": 596.0,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5,
}


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_an_lm_has_the_parameters_of_its_model_card(name: str, millions: float) -> None:
    assert lm_size(name).parameters / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("facebook/contriever", 108.9),
        ("bert-large-uncased", 334.0),
        ("package:minilm", 22.6),
        ("BAAI/bge-small-en-v1.5", 33.4),
    ],
)
def test_an_encoder_has_the_parameters_of_its_model_card(name: str, millions: float) -> None:
    assert encoder_size(name).parameters / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_local_config_gives_the_size_of_an_unknown_model(tmp_path: Path) -> None:
    fields = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    fields |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
    rope = {"hidden_act": "silu", "rope_parameters": {}, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **rope}))
    assert lm_size(str(tmp_path)).parameters == lm_size("package:smollm2").parameters


def test_a_config_without_layers_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}))
    with pytest.raises(UserError, match=r"config\.json has none of num_hidden_layers.*--lm-parameters"):
        lm_size(str(tmp_path))


def test_a_parameter_count_gives_a_model_of_usual_proportions() -> None:
    size = lm_size("in-house", 6.7e9)
    assert (size.layers, size.hidden, size.parameters) == (32, 4096, 6_700_000_000)
    assert encoder_size("in-house", 110e6).hidden == 768


def test_an_unknown_model_is_an_error_that_says_how_to_give_its_size() -> None:
    with pytest.raises(UserError, match=r"lm\.path: the size of 'acme/lm' is not known.*--lm-parameters 7e9"):
        lm_size("acme/lm")
    with pytest.raises(UserError, match=r"retriever\.path: .*--retriever-parameters 110e6"):
        encoder_size("acme/encoder")


DENSE_WIDTH = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two poolings beside one another, and a Dense behind them."""
    write_encoder(tmp_path / "encoder", "bert")
    write_chain(tmp_path / "encoder", {"pooling_mode": ["mean", "cls"]}, ["Dense", "Normalize"])
    return tmp_path / "encoder"


def with_retriever(config: Config, path: Path, dims: int | None = None) -> Config:
    return replace(config, retriever=replace(config.retriever, path=str(path)), index=replace(config.index, dims=dims))


@pytest.mark.parametrize(
    ("pooling", "layers"),
    [
        ({}, []),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, []),
        ({"pooling_mode": "cls"}, ["Dense"]),
        ({"pooling_mode": ["mean", "cls", "max"]}, ["LayerNorm", "Normalize"]),
        ({"pooling_mode": ["mean", "cls"]}, ["Dense", "Normalize"]),
    ],
)
def test_the_width_is_that_of_the_encoder_itself(tmp_path: Path, pooling: dict, layers: list[str]) -> None:
    write_encoder(tmp_path, "bert")
    plain = encoder_size(str(tmp_path))
    if pooling:
        write_chain(tmp_path, pooling, layers)
    found, encoder = encoder_size(str(tmp_path)), Encoder(str(tmp_path))
    assert (found.dim, plain.dim) == (encoder.width, WIDTH)
    modules = encoder.modules_of("document")[1:]
    dense = sum(weight.numel() for part in modules for weight in part.parameters() if weight.dim() == 2)
    assert found.parameters - plain.parameters == dense


def test_a_saved_pair_has_the_size_of_its_documents_encoder(tmp_path: Path) -> None:
    documents, queries = map(str, write_dpr_pair(tmp_path))
    Encoder(documents, query_path=queries).save(tmp_path / "pair")
    assert replace(encoder_size(str(tmp_path / "pair")), name="") == replace(encoder_size(documents), name="")


def test_tuned_queries_count_with_the_encoder_of_their_documents(tmp_path: Path, folder: Path) -> None:
    queries = tmp_path / "run/retriever"
    Encoder(str(folder)).save(queries, DocumentEncoder(str(folder), "sum"))
    alone = encoder_size(str(folder)).parameters
    for path in (queries, tmp_path / "run"):
        assert retriever_size(RetrieverConfig(path=str(path))).parameters == 2 * alone


def test_the_plans_index_is_of_the_vectors_that_are_stored(debug_config: Config, folder: Path) -> None:
    def job(dims: int | None) -> Job:
        return job_of(with_retriever(debug_config, folder, dims), num_documents=1000)

    whole, first = job(None), job(5)
    assert (whole.index.bytes_per_vector, first.index.bytes_per_vector) == (2 * DENSE_WIDTH, 2 * 5)
    assert whole.work.search_batch * 5 == pytest.approx(first.work.search_batch * DENSE_WIDTH)
    assert disk_gb(whole)["index_versions"] > disk_gb(first)["index_versions"]
    with pytest.raises(UserError, match=r"index\.dims is 13, but the retriever's vectors have 12 numbers"):
        job(DENSE_WIDTH + 1)


def test_a_list_of_modules_that_is_no_json_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "modules.json").write_text("[")
    with pytest.raises(UserError, match=r"retriever.path: .*modules\.json cannot be read as JSON"):
        head_size(folder, WIDTH)
