"""Versions on disk: what is marked counts, what is not does not, and damage is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from index_workers.version_store import BuildPlan, VersionStore

PLAN = BuildPlan(
    version=3,
    step=12,
    weights_sha256="w",
    corpus_path="corpus.arrow",
    corpus_sha256="c",
    num_documents=10,
    block_documents=4,
    similarity="cosine",
    max_tokens=64,
    dim=2,
    dtype="float32",
    tokens_per_batch=512,
)
VECTORS = np.arange(20, dtype=np.float32).reshape(10, 2) / 8  # exact in float16


def save_weights(content: bytes) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)

    return save


def write_blocks(store: VersionStore, plan: BuildPlan, blocks: list[int]) -> None:
    for block in blocks:
        rows = plan.rows_of_block(block)
        store.write_block(plan.version, block, VECTORS[rows.start : rows.stop])


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """One snapshot is saved and its build begun."""
    store = VersionStore(tmp_path / "index")
    store.save_snapshot(PLAN.version, save_weights(b"one"))
    store.begin(PLAN)
    return store


@pytest.fixture
def published(store: VersionStore) -> VersionStore:
    write_blocks(store, PLAN, [2, 0, 1])
    store.publish(PLAN)
    return store


def test_a_plans_blocks_cover_every_document_once() -> None:
    assert PLAN.num_blocks == 3
    assert [list(PLAN.rows_of_block(block)) for block in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    exact = replace(PLAN, num_documents=8)
    assert [len(exact.rows_of_block(block)) for block in range(exact.num_blocks)] == [4, 4]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_shards_cover_every_block_once_and_in_order(store: VersionStore, num_shards: int) -> None:
    plan = replace(PLAN, num_documents=4 * 7)
    shards = [list(store.blocks_of_shard(plan, shard, num_shards)) for shard in range(num_shards)]
    assert [block for shard in shards for block in shard] == list(range(7))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_version_that_is_not_published_is_refused(store: VersionStore) -> None:
    write_blocks(store, PLAN, [0, 1, 2])  # all is there but the manifest
    assert store.published() == []
    assert not store.is_published(3)
    with pytest.raises(UserError, match=r"index version 3 is not published: .*manifest\.json is missing"):
        store.plan(3)
    assert store.pending_plan(3) == PLAN
    store.publish(PLAN)
    assert store.published() == [3]
    assert store.plan(3) == PLAN


def test_publishing_with_a_block_unmarked_fails_and_publishes_nothing(store: VersionStore) -> None:
    write_blocks(store, PLAN, [0, 2])
    with pytest.raises(FileNotFoundError):
        store.publish(PLAN)
    assert store.published() == []


def test_published_versions_are_listed_oldest_first(published: VersionStore) -> None:
    for version in (10, 0):
        plan = replace(PLAN, version=version)
        published.save_snapshot(version, save_weights(b"one"))
        published.begin(plan)
        write_blocks(published, plan, [0, 1, 2])
        published.publish(plan)
    assert published.published() == [0, 3, 10]


def test_blocks_without_a_mark_are_embedded_again(store: VersionStore) -> None:
    write_blocks(store, PLAN, [0, 1, 2])
    (store.folder(3) / "block-00001.json").unlink()
    assert store.begin(PLAN) == [1]
    (store.folder(3) / "block-00002.json").unlink()
    assert store.begin(PLAN) == [1, 2]


@pytest.mark.parametrize(
    "change", [{"max_tokens": 32}, {"corpus_sha256": "other"}, {"weights_sha256": "other"}, {"block_documents": 5}]
)
def test_blocks_of_another_plan_are_dropped(published: VersionStore, change: dict) -> None:
    other = replace(PLAN, **change)
    assert published.begin(other) == list(range(other.num_blocks))
    assert not published.is_published(3)
    assert not list(published.folder(3).glob("block-*"))
    assert (published.encoder_folder(3) / "model.safetensors").read_bytes() == b"one"
    assert published.pending_plan(3) == other


def test_blocks_of_the_same_plan_are_kept(published: VersionStore) -> None:
    assert published.begin(PLAN) == []
    assert published.is_published(3)


def test_marks_without_a_plan_are_dropped(store: VersionStore) -> None:
    write_blocks(store, PLAN, [0, 1])
    (store.folder(3) / "plan.json").unlink()
    assert store.begin(replace(PLAN, max_tokens=32)) == [0, 1, 2]


def test_blocks_read_back_as_they_were_written(published: VersionStore) -> None:
    blocks = list(published.read_blocks(3, range(3)))
    assert [block.dtype for block in blocks] == [np.float16] * 3
    np.testing.assert_array_equal(np.concatenate(blocks), VECTORS)
    np.testing.assert_array_equal(next(iter(published.read_blocks(3, [2]))), VECTORS[8:])


def test_a_flipped_byte_is_an_error_that_names_the_file(published: VersionStore) -> None:
    path = published.folder(3) / "block-00001.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    blocks = published.read_blocks(3, range(3))
    np.testing.assert_array_equal(next(blocks), VECTORS[:4])
    with pytest.raises(UserError, match=rf"{path} is damaged.*build the index again"):
        next(blocks)


def test_a_missing_block_is_an_error_that_names_the_file(published: VersionStore) -> None:
    path = published.folder(3) / "block-00002.npy"
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} is missing.*build the index again"):
        list(published.read_blocks(3, range(3)))


def test_a_snapshot_of_the_same_weights_keeps_the_blocks_and_of_others_drops_them(store: VersionStore) -> None:
    write_blocks(store, PLAN, [0, 1])
    first = store.save_snapshot(3, save_weights(b"one"))
    assert store.begin(PLAN) == [2]
    second = store.save_snapshot(3, save_weights(b"two"))
    assert first != second
    assert sorted(path.name for path in store.folder(3).iterdir()) == ["encoder"]
    assert (store.encoder_folder(3) / "model.safetensors").read_bytes() == b"two"
    assert store.begin(PLAN) == [0, 1, 2]


def test_a_half_written_snapshot_is_written_anew(store: VersionStore) -> None:
    def fail(folder: Path) -> None:
        save_weights(b"half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save_snapshot(4, fail)
    assert not store.encoder_folder(4).exists()
    store.save_snapshot(4, save_weights(b"whole"))
    assert (store.encoder_folder(4) / "model.safetensors").read_bytes() == b"whole"
    assert not list(store.root.glob("*.partial"))


def test_only_the_versions_that_are_kept_stay(published: VersionStore) -> None:
    published.save_snapshot(1, save_weights(b"old"))
    published.save_snapshot(4, save_weights(b"new"))
    save_weights(b"half")(published.root / "encoder-v000005.partial")
    published.remove_all_but({3, 4, 9})
    assert sorted(path.name for path in published.root.iterdir()) == ["v000003", "v000004"]
    assert published.published() == [3]
