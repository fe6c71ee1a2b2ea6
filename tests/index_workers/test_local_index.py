"""An index searched in the process that asks, without Ray."""

from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.index_workers.kinds import IndexKind
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import VersionStore
from tests.support.index_versions import LOSSY, ROWS, VECTORS, begin, flip, publish, write_corpus

QUERIES = np.random.default_rng(1).standard_normal((3, VECTORS.shape[1])).astype(np.float32)


def brute_force(vectors: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-(QUERIES @ vectors.astype(np.float16).astype(np.float32).T), axis=1, kind="stable")[:, :k]


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 0 is published."""
    write_corpus(tmp_path / "run" / "data" / "documents")
    store = VersionStore(tmp_path / "run" / "index")
    publish(store, begin(store))
    return store


def test_the_answer_is_that_of_brute_force_with_the_texts_beside_it(store: VersionStore) -> None:
    index = LocalIndex(store.root, threads=1)
    rows, similarities = index.search(QUERIES, 3)
    np.testing.assert_array_equal(rows, brute_force(VECTORS, 3))
    assert (np.diff(similarities, axis=1) <= 0).all()
    assert [doc.id for doc in index.corpus.documents(rows[0])] == [f"d{row}" for row in rows[0]]
    assert index.encoder_folder == store.encoder_folder(0)


def test_a_lossy_kind_answers_from_all_its_shards(store: VersionStore) -> None:
    publish(store, begin(store, version=1, **{**LOSSY, "kind": IndexKind("SQ8", rerank=True, overretrieve=ROWS)}))
    index = LocalIndex(store.root, threads=1)
    assert index.plan.version == 1
    np.testing.assert_array_equal(index.search(QUERIES, 4)[0], brute_force(VECTORS, 4))


def test_the_newest_published_version_answers(store: VersionStore) -> None:
    publish(store, begin(store, version=10), -VECTORS)
    begin(store, version=11)
    np.testing.assert_array_equal(LocalIndex(store.root, threads=1).search(QUERIES, 4)[0], brute_force(-VECTORS, 4))


def test_a_moved_run_directory_is_searched_where_it_lies_now(store: VersionStore, tmp_path: Path) -> None:
    store.root.parent.rename(tmp_path / "moved")
    index = LocalIndex(tmp_path / "moved" / "index", threads=1)
    np.testing.assert_array_equal(index.search(QUERIES, 3)[0], brute_force(VECTORS, 3))
    assert len(index.corpus) == ROWS


def test_nothing_published_is_refused(store: VersionStore, tmp_path: Path) -> None:
    (store.folder(0) / "manifest.json").unlink()
    for folder in (store.root, tmp_path / "gone"):
        with pytest.raises(UserError, match=f"{folder} holds no published index; expected a run directory or"):
            LocalIndex(folder, threads=1)


def test_damage_is_refused_by_the_name_of_the_file(store: VersionStore) -> None:
    flip(store.vectors_path(0, 2), -1)
    with pytest.raises(UserError, match=rf"{store.vectors_path(0, 2)} is damaged, its checksum differs"):
        LocalIndex(store.root, threads=1)


def test_a_corpus_that_is_gone_or_of_another_size_is_refused(store: VersionStore) -> None:
    corpus = store.corpus_path(store.plan(0))
    write_corpus(corpus, rows=ROWS + 1)
    with pytest.raises(UserError, match=rf"{corpus} holds 11 documents, the index 10; build the index again"):
        LocalIndex(store.root, threads=1)
    (corpus / "00000.arrow").unlink()
    for remove in (lambda: None, corpus.rmdir):
        remove()
        with pytest.raises(UserError, match=rf"the index's corpus {corpus} is gone; bring it back, or build"):
            LocalIndex(store.root, threads=1)
