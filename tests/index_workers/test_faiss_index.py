"""The lossy kinds: what FAISS is asked to build, and what it finds, against brute force."""

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.index_workers import faiss_index
from replug.index_workers.exact_search import BlockVectors
from replug.index_workers.faiss_index import (
    FaissShard,
    check_kind,
    fill,
    set_search_threads,
    train_quantizer,
    two_level_centroids,
)
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.index_workers.version_store import VersionStore
from replug.models.hardware import available_cores

DIM, ROWS, FIRST_ROW = 16, 600, 1000
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((ROWS, DIM)).astype(np.float16)
BLOCKS = [VECTORS[start : start + 128] for start in range(0, ROWS, 128)]
QUERIES = RNG.standard_normal((32, DIM)).astype(np.float32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would take longer than so small an index."""
    set_search_threads(1)
    yield
    set_search_threads(available_cores())


def make_shard(folder: Path, kind: IndexKind) -> FaissShard:
    quantizer, out = folder / "quantizer.faiss", folder / "shard.faiss"
    train_quantizer(kind, VECTORS, quantizer)
    fill(quantizer, BLOCKS, out)
    return FaissShard(out, kind, BlockVectors(FIRST_ROW, BLOCKS, DIM))


def brute_force(k: int) -> tuple[np.ndarray, np.ndarray]:
    similarities = (QUERIES.astype(np.float64) @ VECTORS.astype(np.float64).T).astype(np.float32)
    rows = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return rows + FIRST_ROW, np.take_along_axis(similarities, rows, axis=1)


# What can be built ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("hnsw", "could not parse index string hnsw"),
        ("PQ7", "should be a multiple of the number of subquantizers"),
        ("LSH", "metric == METRIC_L2"),
    ],
)
def test_a_name_that_faiss_does_not_know_is_refused_with_its_reason(factory: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        check_kind(IndexKind(factory), DIM, ROWS)
    message = str(caught.value)
    assert message.startswith(f"index.kind is {factory}; expected flat_fp16, sq8, pq, ivf_sq8, ivf_pq or a FAISS ")
    assert reason in message and "for 16 dimensions" in message and "Error" not in message


@pytest.mark.parametrize("factory", ["IDMap,Flat", "IVF16,SQ8,RFlat", "IVF4,PQ4x12"])
def test_what_could_not_be_filled_or_searched_is_refused_beforehand(factory: str) -> None:
    with pytest.raises(UserError, match=f"index.kind is {factory}"):
        check_kind(IndexKind(factory), DIM, ROWS)
    with pytest.raises(UserError, match="needs 64 documents to be trained; the corpus has 63"):
        check_kind(IndexKind("IVF64,SQ8"), DIM, 63)
    check_kind(IndexKind("IVF64,SQ8"), DIM, 64)


# What is found --------------------------------------------------------------------------------------------

FACTORIES = ["SQ8", "IVF16,SQ8", "OPQ4_16,IVF16,PQ4np", "PCA8,SQ8", "PCAR8,IVF16,SQ8", "IVF16_HNSW8,SQ8"]
FACTORIES += ["PQ4x4fs", "IVF16,PQ4x4fs"]  # the presets


@pytest.mark.parametrize("factory", FACTORIES)
def test_every_document_is_found_once_and_all_candidates_make_the_answer_exact(tmp_path: Path, factory: str) -> None:
    shard = make_shard(tmp_path, IndexKind(factory, nprobe=1 if "IVF" in factory else 0))
    assert len(shard) == ROWS
    rows, similarities = shard.search(QUERIES, ROWS + 5)
    for found in rows:
        assert sorted(found) == list(range(FIRST_ROW, FIRST_ROW + ROWS))
    assert (np.diff(similarities, axis=1) <= 0).all()
    kind = IndexKind(factory, nprobe=16 if "IVF" in factory else 0, overretrieve=ROWS)
    exact = FaissShard(tmp_path / "shard.faiss", kind, BlockVectors(FIRST_ROW, BLOCKS, DIM))
    for found, expected in zip(exact.search(QUERIES, 10), brute_force(10), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("factory", ["OPQ4_16,IVF16,PQ4np", "IVF16,PQ4x4fs"])
def test_the_same_vectors_give_the_same_file(tmp_path: Path, factory: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_shard(tmp_path / name, IndexKind(factory, nprobe=2))
    for file in ("quantizer.faiss", "shard.faiss"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


# Very many lists ------------------------------------------------------------------------------------------

CLUSTERED = np.repeat(RNG.standard_normal((40, DIM)), 60, axis=0) + 0.05 * RNG.standard_normal((2400, DIM))
TINY = np.concatenate([1 + 1e-3 * RNG.standard_normal((2390, DIM)), 100 * RNG.standard_normal((10, DIM))])
DEGENERATE = {"clusters": CLUSTERED, "all equal": np.ones((2400, DIM)), "a few far away": TINY}


@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("count", [60, 2400])
def test_two_levels_give_as_many_centroids_as_asked_for(name: str, count: int) -> None:
    vectors = DEGENERATE[name] / np.linalg.norm(DEGENERATE[name], axis=1, keepdims=True)
    centroids = two_level_centroids(vectors.astype(np.float32), count, 3, spherical=True)
    assert centroids.shape == (count, DIM) and centroids.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("factory", ["IVF16,PQ4x4fs", "PCAR8,IVF16,SQ8", "IVF16_HNSW8,SQ8"])
def test_lists_that_were_trained_in_two_levels_find_the_nearest_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    monkeypatch.setattr(faiss_index, "MOST_LISTS_AT_ONCE", 8)
    rows, _ = make_shard(tmp_path, IndexKind(factory, nprobe=8, overretrieve=8)).search(QUERIES, 10)
    found = [len(np.intersect1d(*pair)) for pair in zip(rows, brute_force(10)[0], strict=True)]
    assert np.mean(found) / 10 > 0.75  # half of the documents by chance, in half of the lists


# What the disk does not take --------------------------------------------------------------------------------


def test_an_index_file_that_the_disk_does_not_take_is_an_error_that_names_it(tmp_path: Path) -> None:
    quantizer, store = tmp_path / "quantizer.faiss", VersionStore(tmp_path)
    train_quantizer(IndexKind("SQ8"), VECTORS, quantizer)
    path = tmp_path / "shard-00000.faiss"
    says = rf"{path}\S*\.partial cannot be written: .*File too large"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as on a full disk: of any file that is written
    try:
        with pytest.raises(RunError, match=says):
            store.write_marked(path, lambda partial: fill(quantizer, BLOCKS, partial))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [found.name for found in tmp_path.glob("shard-*")] == []
    store.write_marked(path, lambda partial: fill(quantizer, BLOCKS, partial))


# The kind that a name in the configuration becomes ---------------------------------------------------------


def test_more_documents_have_more_candidates_where_coarse_codes_alone_order_them() -> None:
    rows = 100_000, 3_000_000, 4_000_000, 16_000_000, 36_000_000
    assert [resolve_kind("pq", 384, number, None).overretrieve for number in rows] == [16, 16, 32, 64, 96]
    assert {resolve_kind("ivf_pq", 384, number, None).overretrieve for number in rows} == {8}
