"""Versions on disk: what is marked counts, what is not does not, and every kind of damage is named with its file."""

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.data.folder import read_mark, require_file, write_mark
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.searcher import open_shard
from replug.index_workers.version_store import VersionStore, map_vectors, write_vectors
from tests.support import index_versions
from tests.support.command_line import CommandLine
from tests.support.index_versions import LOSSY, PLAN, begin, flip, publish, save_weights, write_corpus

VECTORS = np.arange(20, dtype=np.float32).reshape(10, 2) / 8  # exact in float16


def write_vectors_of(store: VersionStore, plan: BuildPlan, files: list[int]) -> None:
    for file in files:
        rows = plan.rows_of_file(file)
        store.write_vectors(plan.version, file, VECTORS[rows.start : rows.stop])


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """One snapshot is saved and its build begun."""
    store = VersionStore(tmp_path / "index")
    store.save_snapshot(PLAN.version, save_weights(b"one"))
    store.begin(PLAN)
    return store


@pytest.fixture
def published(store: VersionStore) -> VersionStore:
    write_vectors_of(store, PLAN, [2, 0, 1])
    store.publish(PLAN)
    return store


def test_a_version_that_is_not_published_is_refused(store: VersionStore) -> None:
    write_vectors_of(store, PLAN, [0, 1, 2])  # all is there but the manifest
    assert store.published() == []
    assert not store.is_published(3)
    with pytest.raises(UserError, match=r"index version 3 is not published: .*manifest\.json is missing"):
        store.plan(3)
    assert store.pending_plan(3) == PLAN
    store.publish(PLAN)
    assert store.published() == [3]
    assert store.plan(3) == PLAN


def test_files_without_a_mark_are_embedded_again_and_nothing_is_published_without_them(store: VersionStore) -> None:
    write_vectors_of(store, PLAN, [0, 1, 2])
    (store.folder(3) / "vectors-00001.json").unlink()
    assert store.begin(PLAN) == ([1], False, [])
    with pytest.raises(RunError, match=rf"{store.folder(3)}/vectors-00001\.json is missing"):
        store.publish(PLAN)
    assert store.published() == []


@pytest.mark.parametrize(
    "change", [{"max_tokens": 32}, {"corpus_sha256": "other"}, {"weights_sha256": "other"}, {"block_documents": 5}]
)
def test_files_of_another_plan_are_dropped(published: VersionStore, change: dict) -> None:
    other = replace(PLAN, **change)
    assert published.begin(other)[0] == list(range(other.num_files))
    assert not published.is_published(3)
    assert not list(published.folder(3).glob("vectors-*"))
    assert (published.encoder_folder(3) / "model.safetensors").read_bytes() == b"one"
    assert published.pending_plan(3) == other


# The manifest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, 3, 7])
def test_a_version_of_another_format_is_refused(published: VersionStore, format: int | None) -> None:
    for name, read in (("manifest.json", published.plan), ("inputs.json", published.pending_plan)):
        path = published.folder(3) / name
        write_mark(path, {**read_mark(path, ""), "format": format})
        with pytest.raises(UserError, match=rf"{path} was written by another version of replug; remove {path.parent}"):
            read(3)


# Disk and snapshots -------------------------------------------------------------------------------------


def test_a_snapshot_of_the_same_weights_keeps_the_vectors_and_of_others_drops_them(store: VersionStore) -> None:
    write_vectors_of(store, PLAN, [0, 1])
    first = store.save_snapshot(3, save_weights(b"one"))
    assert store.begin(PLAN)[0] == [2]
    second = store.save_snapshot(3, save_weights(b"two"))
    assert first != second
    assert sorted(path.name for path in store.folder(3).iterdir()) == ["encoder"]
    assert (store.encoder_folder(3) / "model.safetensors").read_bytes() == b"two"
    assert store.begin(PLAN)[0] == [0, 1, 2]


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


# Files of vectors -----------------------------------------------------------------------------------------------------


FLOATS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


def test_mapped_vectors_are_those_that_were_written_and_the_file_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "vectors.npy"
    write_vectors(path, FLOATS)
    content = path.read_bytes()
    vectors = map_vectors(path, (20, 3))
    np.testing.assert_array_equal(vectors, FLOATS.astype(np.float16))
    vectors[:] = 0
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", [0, 5, 100, 128, 200, -1])
def test_a_file_that_was_cut_short_is_damaged_and_never_mapped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "vectors.npy"
    write_vectors(path, FLOATS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=rf"{path} is damaged, "):
        map_vectors(path, (20, 3))


# What a system allows --------------------------------------------------------------------------------------


def test_more_files_than_descriptors_are_served_and_a_limit_of_the_system_is_called_one(tmp_path: Path) -> None:
    store, plan = VersionStore(tmp_path / "index"), replace(PLAN, version=0, num_documents=640)
    vectors = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float16)
    store.save_snapshot(0, save_weights(b"w"))
    store.begin(plan)
    publish(store, plan, vectors)
    path, fields = store.vectors_path(0, 7), {"bytes": store.vectors_path(0, 7).stat().st_size}
    assert plan.num_files == 160
    held, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        shard = open_shard(store, plan, 0, 1)
        assert shard.search(np.ones((1, 2), np.float32), 640)[0].shape == (1, 640)
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(RunError) as caught:
            require_file(path, fields, "")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "vectors-00007.npy cannot be read: Too many open files" in str(caught.value)
    assert "this is a limit of the system and the file may be whole: see `ulimit -n`" in str(caught.value)


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lossy(tmp_path: Path) -> VersionStore:
    """Version 0 is of a lossy kind and published."""
    write_corpus(tmp_path / "run/data/documents")
    store = VersionStore(tmp_path / "run/index")
    publish(store, begin(store, **LOSSY))
    return store


def flip_a_name(store: VersionStore) -> None:
    path = store.folder(0) / "manifest.json"
    flip(path, path.read_bytes().index(b"npy"))  # within a string


OTHER_CORPUS = "the corpus {run}/data/documents is gone, or changed since it was embedded"
DAMAGE: list[tuple[Callable[[VersionStore], object], str]] = [
    (lambda store: store.vectors_path(0, 0).unlink(), "{v}/vectors-00000.npy is missing"),
    (lambda store: flip(store.shard_path(0, 1), 60), "{v}/shard-00001.faiss is damaged: its checksum differs"),
    (flip_a_name, "{v}/manifest.json is damaged: its content differs from its own checksum; "),
    (lambda store: write_corpus(store.corpus_path(store.plan(0)), rows=11), OTHER_CORPUS),
    (lambda store: shutil.rmtree(store.corpus_path(store.plan(0))), OTHER_CORPUS),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_damage_is_named_with_its_file_and_nothing_else_is(
    damage: Callable, says: str, lossy: VersionStore, replug: CommandLine
) -> None:
    """An unfinished version beside it is noted and not wrong."""
    begin(lossy, version=1)
    intact = replug("doctor", lossy.root)
    assert intact.output == f"{lossy.folder(0)}: all intact\n{lossy.folder(1)}: unfinished\n" and intact.status == 0
    damage(lossy)
    ended = replug("doctor", lossy.root)
    assert ended.status == 1 and f"{lossy.folder(0)}: wrong in 1 places\n" in ended.output
    assert f"WRONG: {says.format(v=lossy.folder(0), run=lossy.root.parent)}" in ended.output


def test_another_encoder_in_the_place_of_the_one_that_embedded_is_refused(lossy: VersionStore) -> None:
    (lossy.encoder_folder(0) / "model.safetensors").write_bytes(b"of another training")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        LocalIndex(lossy.root, 1)


def test_a_moved_run_directory_is_searched_where_it_lies_now(lossy: VersionStore, tmp_path: Path) -> None:
    lossy.root.parent.rename(tmp_path / "moved")
    index, vectors = LocalIndex(tmp_path / "moved/index", threads=1), index_versions.VECTORS
    queries = np.random.default_rng(1).standard_normal((3, vectors.shape[1])).astype(np.float32)
    rows, similarities = index.search(queries, 3)
    products = queries @ vectors.astype(np.float16).astype(np.float32).T
    np.testing.assert_array_equal(rows, np.argsort(-products, axis=1, kind="stable")[:, :3])
    assert (np.diff(similarities, axis=1) <= 0).all()
    assert [doc.id for doc in index.corpus.documents(rows[0])] == [f"d{row}" for row in rows[0]]


def test_a_corpus_that_is_gone_or_of_another_size_is_refused(lossy: VersionStore) -> None:
    corpus = lossy.corpus_path(lossy.plan(0))
    write_corpus(corpus, rows=11)
    with pytest.raises(UserError, match=rf"{corpus} holds 11 documents, but index version 0 was begun over 10"):
        LocalIndex(lossy.root, threads=1)
    (corpus / "00000.arrow").unlink()
    with pytest.raises(UserError, match=rf"the index's corpus {corpus} is gone; bring it back, or build"):
        LocalIndex(lossy.root, threads=1)
