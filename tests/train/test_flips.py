"""One flipped bit in the files of a run and of an index: caught by name, or without effect. Never another answer."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.data.files import file_sha256
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import VersionStore
from replug.train.run_dir import CheckpointMark, RunDirectory
from tests.support.index_versions import DIM, LOSSY, begin, publish, write_corpus

FLIPS = 12  # of each file, at places spread over it


def flipped(path: Path, count: int = FLIPS) -> Iterator[None]:
    """The file with one bit after another flipped; whole again at the end."""
    whole = path.read_bytes()
    rng = np.random.default_rng(len(whole))
    for place in sorted({int(place) for place in rng.integers(len(whole), size=count)}):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        yield
    path.write_bytes(whole)


def num_caught(path: Path, read: Callable[[], object]) -> int:
    """How many flips were caught; the others must change nothing."""
    before, caught = read(), 0
    for _ in flipped(path):
        try:
            after = read()
        except (UserError, RunError):
            caught += 1
        else:
            assert after == before, path
    return caught


@pytest.mark.parametrize("changes", [{}, LOSSY], ids=["exact", "lossy"])
def test_an_index_answers_the_same_or_not_at_all(changes: dict, tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "index")
    write_corpus(tmp_path / "data/documents")
    publish(store, begin(store, **changes))
    queries = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)

    def search() -> list:
        return [part.tolist() for part in LocalIndex(tmp_path / "index", 1).search(queries, 4)]

    files = [path for path in sorted((tmp_path / "index").rglob("*")) if path.is_file()]
    caught = {path.name for path in files if num_caught(path, search)}
    assert {"manifest.json", "model.safetensors", "tokenizer.json", "config.json"} <= caught
    assert caught & {"vectors-00000.npy", "shard-00000.faiss"}


def test_a_checkpoints_mark_leads_to_a_whole_checkpoint_or_to_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_corpus(run.data / "documents")
    begin(VersionStore(run.index), version=0)
    run.checkpoints.mkdir()
    for step in (4, 8):
        run.checkpoint(step).write_bytes(os.urandom(100))
        run.mark(CheckpointMark(run.checkpoint(step), step, (0,), file_sha256(run.checkpoint(step))))
    mark = run.checkpoint(8).with_suffix(".json")
    for _ in flipped(mark, 200):
        newest = run.newest_checkpoint()
        assert newest is not None
        assert newest.sha256 == file_sha256(run.checkpoint(newest.step))
    newest = run.newest_checkpoint()
    assert newest is not None and newest.step == 8
