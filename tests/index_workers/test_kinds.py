"""Index kinds: what a name in the configuration becomes."""

import pytest

from replug.index_workers.kinds import (
    POINTS_PER_LIST,
    IndexKind,
    default_nprobe,
    default_overretrieve,
    preset_lists,
    resolve_kind,
)


def resolve(name: str, num_documents: int = 100_000, nprobe: int | None = None, rerank: bool = True) -> IndexKind:
    return resolve_kind(name, 384, num_documents, nprobe, rerank)


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
    assert resolve(name) == IndexKind(factory, nprobe, rerank=True, overretrieve=default_overretrieve(factory))


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
