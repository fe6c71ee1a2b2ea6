"""Index kinds: what a name in the configuration becomes."""

import numpy as np
import pytest

from index_workers.kinds import (
    POINTS_PER_LIST,
    IndexKind,
    default_nprobe,
    num_lists,
    preset_lists,
    resolve_kind,
    training_rows,
)


def resolve(name: str, num_documents: int = 100_000, nprobe: int | None = None, rerank: bool = True) -> IndexKind:
    return resolve_kind(name, 384, num_documents, nprobe, rerank, over=4)


def test_flat_fp16_is_exact_and_needs_no_candidates() -> None:
    kind = resolve("flat_fp16", nprobe=32)
    assert kind == IndexKind(factory=None, nprobe=0, rerank=False, overretrieve=1)
    assert kind.is_exact and kind.uses_vectors


@pytest.mark.parametrize(
    ("name", "factory", "nprobe"),
    [
        ("sq8", "SQ8", 0),
        ("ivf_sq8", "IVF2048,SQ8", 32),
        ("ivf_pq", "OPQ64_256,IVF2048,PQ64", 32),
        ("IVF512,PQ48", "IVF512,PQ48", 8),
        ("HNSW32", "HNSW32", 0),
    ],
)
def test_a_preset_becomes_a_factory_string_and_any_other_name_is_one(name: str, factory: str, nprobe: int) -> None:
    assert resolve(name) == IndexKind(factory, nprobe, rerank=True, overretrieve=4)


def test_without_reranking_no_more_candidates_are_asked_for_and_no_vectors_read() -> None:
    kind = resolve("sq8", rerank=False)
    assert kind.overretrieve == 1
    assert not kind.uses_vectors
    assert resolve("sq8").uses_vectors


@pytest.mark.parametrize(("dim", "parts"), [(32, 8), (30, 7), (384, 64), (4096, 64)])
def test_a_product_quantizer_has_sub_vectors_of_four_dimensions_and_at_most_64(dim: int, parts: int) -> None:
    kind = resolve_kind("ivf_pq", dim, 100_000, None, True, 4)
    assert kind.factory == f"OPQ{parts}_{4 * parts},IVF2048,PQ{parts}"


@pytest.mark.parametrize("documents", [1, 38, 39, 78, 1000, 10_000, 1_000_000, 36_000_000])
def test_the_lists_of_a_preset_are_a_power_of_two_that_can_be_trained(documents: int) -> None:
    lists = preset_lists(documents)
    assert lists >= 1 and lists & (lists - 1) == 0
    assert lists == 1 or lists * POINTS_PER_LIST <= documents
    assert lists <= 16 * documents**0.5
    assert lists == 1 or 2 * lists > min(16 * documents**0.5, documents / POINTS_PER_LIST)


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [("IVF64,SQ8", 16, 16), ("IVF64,SQ8", 999, 64), ("IVF4,SQ8", None, 4), ("IVF4096,SQ8", None, 64), ("sq8", 5, 0)],
)
def test_nprobe_is_at_most_the_number_of_lists(name: str, asked: int | None, given: int) -> None:
    assert resolve(name, nprobe=asked).nprobe == given


def test_nprobe_is_by_default_a_64th_of_the_lists_and_eight_at_least() -> None:
    assert [default_nprobe(lists) for lists in (0, 1, 512, 1024, 65536)] == [0, 8, 8, 16, 1024]


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


def test_every_list_has_twice_the_points_that_k_means_wants() -> None:
    assert len(training_rows("IVF4096,SQ8", 10**7)) == 2 * POINTS_PER_LIST * 4096
