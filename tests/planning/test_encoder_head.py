"""Vectors in a plan are as wide as the encoder's own, behind its modules, or as `index.dims` says."""

from dataclasses import replace
from pathlib import Path

import pytest

from replug.commands.checks.configuration import stored_retriever
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.models.encoder import Encoder
from replug.planning.encoder_head import head_size
from replug.planning.estimate import Job, job_of
from replug.planning.model_sizes import encoder_size
from replug.planning.plans import disk_gb
from replug.planning.sizes import run_sizes
from replug.planning.workload import network_gb
from tests.support.encoder_folders import WIDTH, write_chain, write_encoder, write_json

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
    if "pooling_mode_cls_token" in pooling:  # sentence-transformers puts them beside one another in an order of its own
        write_json(tmp_path / "1_Pooling/config.json", pooling)
    elif pooling:
        write_chain(tmp_path, pooling, layers)
    found, encoder = encoder_size(str(tmp_path)), Encoder(str(tmp_path))
    assert (found.dim, plain.dim) == (encoder.width, WIDTH)
    dense = sum(weight.numel() for weight in encoder.head.parameters() if weight.dim() == 2)
    assert found.parameters - plain.parameters == dense


def test_the_plans_index_is_of_the_vectors_that_are_stored(debug_config: Config, folder: Path) -> None:
    def job(dims: int | None) -> Job:
        return job_of(with_retriever(debug_config, folder, dims), num_documents=1000)

    whole, first = job(None), job(5)
    assert (whole.index.bytes_per_vector, first.index.bytes_per_vector) == (2 * DENSE_WIDTH, 2 * 5)
    assert whole.work.search_batch * 5 == pytest.approx(first.work.search_batch * DENSE_WIDTH)
    sent = network_gb(whole.shape, whole.retriever, 1)["vectors_to_searchers"]
    assert sent * 1e9 == pytest.approx(whole.shape.num_builds * 1000 * 2 * DENSE_WIDTH)
    assert disk_gb(whole)["index_versions"] > disk_gb(first)["index_versions"]
    with pytest.raises(UserError, match=r"index\.dims is 13, but the retriever's vectors have 12 numbers"):
        job(DENSE_WIDTH + 1)


def test_the_checks_before_a_run_take_the_same_width(debug_config: Config, folder: Path) -> None:
    whole, first = with_retriever(debug_config, folder), with_retriever(debug_config, folder, 5)
    assert [stored_retriever(config).dim for config in (whole, first)] == [DENSE_WIDTH, 5]
    of_whole, of_first = (run_sizes(config, 1000, False).vectors for config in (whole, first))
    assert of_whole and of_first and of_whole * 5 == pytest.approx(of_first * DENSE_WIDTH)


def test_a_list_of_modules_that_is_no_json_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "modules.json").write_text("[")
    with pytest.raises(UserError, match=r"retriever.path: .*modules\.json cannot be read as JSON"):
        head_size(folder, WIDTH)
