"""Index kinds: what a name in the configuration becomes."""

import numpy as np
import pytest

from replug.index_workers.kinds import (
    POINTS_PER_LIST,
    IndexKind,
    default_nprobe,
    num_centroids,
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


@pytest.mark.parametrize("documents", [1, 38, 39, 78, 1000, 10_000, 1_000_000, 36_000_000])
def test_the_lists_of_a_preset_are_a_power_of_two_that_can_be_trained(documents: int) -> None:
    lists = preset_lists(documents)
    assert lists >= 1 and lists & (lists - 1) == 0
    assert lists == 1 or lists * POINTS_PER_LIST <= documents
    assert lists <= max(1, 8 * documents**0.5)
    assert lists == 1 or 2 * lists > min(8 * documents**0.5, documents / POINTS_PER_LIST)


@pytest.mark.parametrize(("codes", "nprobe"), [("SQ8", [8, 8, 32, 2048]), ("PQ8x4fs", [8, 8, 32, 2048])])
def test_nprobe_is_by_default_a_32nd_of_the_lists_and_eight_at_least(codes: str, nprobe: list[int]) -> None:
    assert [default_nprobe(f"IVF{lists},{codes}") for lists in (1, 128, 1024, 65536)] == nprobe
    assert default_nprobe(codes) == 0


@pytest.mark.parametrize(
    ("factory", "centroids"),
    [("SQ8", 1), ("IVF16,SQ8", 16), ("PQ8", 256), ("PQ8x4fs", 16), ("PQ8x10", 1024), ("IVF512,PQ8x4fs", 512)],
)
def test_the_most_centroids_of_a_kind_are_of_its_lists_or_its_codes(factory: str, centroids: int) -> None:
    assert num_centroids(factory) == centroids


@pytest.mark.parametrize(("factory", "documents", "sample"), [("SQ8", 100, 100), ("IVF4,SQ8", 10**6, 19_968)])
def test_the_training_rows_are_spread_evenly_and_the_same_every_time(factory: str, documents: int, sample: int) -> None:
    rows = training_rows(factory, documents)
    np.testing.assert_array_equal(rows, training_rows(factory, documents))
    assert (rows[0], rows[-1], len(rows)) == (0, documents - 1, sample)
    assert len(np.unique(rows)) == sample
    assert np.ptp(np.diff(rows)) <= 1
