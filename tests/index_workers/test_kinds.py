"""Index kinds: what a name in the configuration becomes."""

from pathlib import Path

import numpy as np
import pytest

from replug.index_workers.faiss_index import FaissShard, check_kind, fill, train_quantizer
from replug.index_workers.kinds import (
    LEAST_CENTROIDS,
    POINTS_PER_LIST,
    PRESETS,
    IndexKind,
    bytes_per_vector,
    default_nprobe,
    default_overretrieve,
    num_centroids,
    num_lists,
    preset_lists,
    resolve_kind,
    training_rows,
)


def resolve(name: str, num_documents: int = 100_000, nprobe: int | None = None, rerank: bool = True) -> IndexKind:
    return resolve_kind(name, 384, num_documents, nprobe, rerank, overretrieve=6)


def test_flat_fp16_is_exact_and_needs_no_candidates() -> None:
    kind = resolve("flat_fp16", nprobe=32)
    assert kind == IndexKind(factory=None, nprobe=0, rerank=False, overretrieve=1)
    assert kind.is_exact and kind.uses_vectors


@pytest.mark.parametrize(
    ("name", "factory", "nprobe"),
    [
        ("sq8", "SQ8", 0),
        ("pq", "PQ96x4fs", 0),
        ("ivf_sq8", "IVF2048,SQ8", 64),
        ("ivf_pq", "IVF2048,PQ192x4fs", 64),
        ("IVF512,PQ48", "IVF512,PQ48", 16),
        ("HNSW32", "HNSW32", 0),
    ],
)
def test_a_preset_becomes_a_factory_string_and_any_other_name_is_one(name: str, factory: str, nprobe: int) -> None:
    assert resolve(name) == IndexKind(factory, nprobe, rerank=True, overretrieve=6)


def test_without_reranking_no_more_candidates_are_asked_for_and_no_vectors_read() -> None:
    kind = resolve("sq8", rerank=False)
    assert kind.overretrieve == 1
    assert not kind.uses_vectors
    assert resolve("sq8").uses_vectors


@pytest.mark.parametrize(("dim", "parts"), [(32, 8), (384, 96), (768, 192), (4096, 1024)])
def test_the_codes_of_a_preset_are_of_four_bits_for_each_four_or_two_dimensions(dim: int, parts: int) -> None:
    assert resolve_kind("pq", dim, 100_000, None, True, None).factory == f"PQ{parts}x4fs"
    assert resolve_kind("ivf_pq", dim, 100_000, None, True, None).factory == f"IVF2048,PQ{2 * parts}x4fs"


@pytest.mark.parametrize("documents", [1, 38, 39, 78, 1000, 10_000, 1_000_000, 36_000_000])
def test_the_lists_of_a_preset_are_a_power_of_two_that_can_be_trained(documents: int) -> None:
    lists = preset_lists(documents)
    assert lists >= 1 and lists & (lists - 1) == 0
    assert lists == 1 or lists * POINTS_PER_LIST <= documents
    assert lists <= max(1, 8 * documents**0.5)
    assert lists == 1 or 2 * lists > min(8 * documents**0.5, documents / POINTS_PER_LIST)


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [("IVF64,SQ8", 16, 16), ("IVF64,SQ8", 999, 64), ("IVF4,SQ8", None, 4), ("IVF4096,SQ8", None, 128), ("sq8", 5, 0)],
)
def test_nprobe_is_at_most_the_number_of_lists(name: str, asked: int | None, given: int) -> None:
    assert resolve(name, nprobe=asked).nprobe == given


@pytest.mark.parametrize(("codes", "nprobe"), [("SQ8", [8, 8, 32, 2048]), ("PQ8x4fs", [8, 8, 32, 2048])])
def test_nprobe_is_by_default_a_32nd_of_the_lists_and_eight_at_least(codes: str, nprobe: list[int]) -> None:
    assert [default_nprobe(f"IVF{lists},{codes}") for lists in (1, 128, 1024, 65536)] == nprobe
    assert default_nprobe(codes) == 0


@pytest.mark.parametrize(
    ("factory", "candidates"), [("SQ8", 4), ("IVF64,SQ8", 4), ("HNSW32", 4), ("PQ8x4fs", 16), ("IVF64,RaBitQ", 8)]
)
def test_coarse_codes_have_more_candidates_by_default(factory: str, candidates: int) -> None:
    assert default_overretrieve(factory) == candidates
    assert resolve_kind(factory, 384, 10_000, None, True, None).overretrieve == candidates
    assert resolve_kind(factory, 384, 10_000, None, True, 5).overretrieve == 5
    assert resolve_kind(factory, 384, 10_000, None, False, 5).overretrieve == 1


@pytest.mark.parametrize(
    ("factory", "centroids"),
    [("SQ8", 1), ("IVF16,SQ8", 16), ("PQ8", 256), ("PQ8x4fs", 16), ("PQ8x10", 1024), ("IVF512,PQ8x4fs", 512)],
)
def test_the_most_centroids_of_a_kind_are_of_its_lists_or_its_codes(factory: str, centroids: int) -> None:
    assert num_centroids(factory) == centroids


@pytest.mark.parametrize(
    ("factory", "lists"), [("SQ8", 0), ("IVF16,Flat", 16), ("OPQ8_32,IVF256_HNSW32,PQ8", 256), ("", 0)]
)
def test_the_lists_are_read_from_the_factory_string(factory: str, lists: int) -> None:
    assert num_lists(factory) == lists


@pytest.mark.parametrize(("factory", "documents", "sample"), [("SQ8", 100, 100), ("IVF4,SQ8", 10**6, 19_968)])
def test_the_training_rows_are_spread_evenly_and_the_same_every_time(factory: str, documents: int, sample: int) -> None:
    rows = training_rows(factory, documents)
    np.testing.assert_array_equal(rows, training_rows(factory, documents))
    assert (rows[0], rows[-1], len(rows)) == (0, documents - 1, sample)
    assert len(np.unique(rows)) == sample
    assert np.ptp(np.diff(rows)) <= 1


@pytest.mark.parametrize(
    ("factory", "centroids"), [("IVF4096,SQ8", 4096), ("PQ8x10", 1024), ("PQ8x4fs", LEAST_CENTROIDS)]
)
def test_every_centroid_has_twice_the_points_that_k_means_wants(factory: str, centroids: int) -> None:
    assert len(training_rows(factory, 10**7)) == 2 * POINTS_PER_LIST * centroids


def test_of_very_many_lists_each_has_the_points_that_k_means_wants() -> None:
    """Twice as many would be 16 GB of float32 numbers of 768 dimensions for 65,536 lists."""
    points = [len(training_rows(f"IVF{lists},SQ8", 10**7)) for lists in (4096, 8192, 16384, 65536)]
    assert points == [POINTS_PER_LIST * lists for lists in (8192, 8192, 16384, 65536)]


def test_a_preset_that_is_added_to_the_table_is_built_searched_and_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So adding one touches that module, and the description of the key."""
    monkeypatch.setitem(PRESETS, "sq4", lambda dim, lists: f"IVF{lists},SQ4")
    kind = resolve_kind("sq4", 16, 400, None, False, None)
    vectors = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    check_kind(kind, 16, 400)
    train_quantizer(kind, vectors, tmp_path / "quantizer")
    assert fill(tmp_path / "quantizer", [vectors], tmp_path / "filled") == 400
    rows, _ = FaissShard(tmp_path / "filled", 0, kind, vectors=None).search(vectors[:1], 1)
    assert rows.tolist() == [[0]]
    added = (tmp_path / "filled").stat().st_size - (tmp_path / "quantizer").stat().st_size
    assert added == pytest.approx(400 * (bytes_per_vector(kind.factory or "", 16, 400) or 0), rel=0.02)
