"""Versions on disk: what is marked counts, what is not does not, and damage is named."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.data.folder import read_mark, write_mark
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.version_store import VersionStore, map_vectors, write_vectors
from tests.support.command_line import ROOT
from tests.support.index_versions import PLAN, save_weights

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

MANY_FILES = """
import os, resource, sys
from pathlib import Path
import numpy as np
from replug.config.errors import RunError
from replug.data.folder import require_file
from replug.index_workers.searcher import open_shard
from replug.index_workers.version_store import VersionStore

store = VersionStore(Path(sys.argv[1]))
plan = store.plan(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
shard = open_shard(store, plan, 0, 1)
print(shard.search(np.ones((1, 2), np.float32), 640)[0].shape, len(os.listdir("/proc/self/fd")))

held, path = [], store.vectors_path(0, 7)
try:
    while True:
        held.append(open(sys.argv[0]))
except OSError:
    pass
try:
    require_file(path, {"bytes": path.stat().st_size}, "")
except RunError as error:
    print(error)
"""


def test_more_files_than_descriptors_are_served_and_a_limit_of_the_system_is_called_one(tmp_path: Path) -> None:
    store, plan = VersionStore(tmp_path / "index"), replace(PLAN, version=0, num_documents=640)
    vectors = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float16)
    store.save_snapshot(0, save_weights(b"w"))
    store.begin(plan)
    assert plan.num_files == 160
    for file in range(160):
        store.write_vectors(0, file, vectors[4 * file : 4 * file + 4])
    store.publish(plan)
    script = tmp_path / "many_files.py"
    script.write_text(MANY_FILES)
    command = [sys.executable, str(script), str(store.root)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert re.fullmatch(r"\(1, 640\) \d\d?", lines[0])
    assert re.search(r"vectors-00007\.npy cannot be read: Too many open files", lines[1]), lines[1]
    assert "this is a limit of the system and the file may be whole: see `ulimit -n`" in lines[1]
