"""Rows come back from Arrow files in the order asked for."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from replug.config.errors import RunError
from replug.data.records import Document, Window
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    ROWS_PER_BATCH,
    write_documents,
    write_rows,
    write_token_ids,
    write_token_rules,
    write_windows,
)
from replug.data.store import CorpusStore, WindowStore, _open_tokens

DOCUMENTS = [Document(f"d{i}", f"text {i} 🙂", "odd" if i % 2 else "even", f"s{i // 2}") for i in range(5)]
WINDOWS = [
    Window("q0", "one", " two", "all", "s", ("d1", "d0")),
    Window("q1", "three", " four\n", "all"),
    Window("q2", "中", "🙂", "x", None, ("d2",)),
]


@pytest.fixture
def corpus(tmp_path):
    write_documents(tmp_path / "documents", DOCUMENTS)
    return CorpusStore(tmp_path / "documents")


@pytest.fixture
def windows(tmp_path):
    write_windows(tmp_path / "queries.arrow", WINDOWS)
    return WindowStore(tmp_path / "queries.arrow")


def test_documents_come_in_the_order_asked_for_repeated_where_asked_twice(corpus):
    rows = np.array([3, 0, 3, 4])
    assert corpus.documents(rows) == [DOCUMENTS[i] for i in rows]
    assert corpus.texts(rows) == [DOCUMENTS[i].text for i in rows]
    assert corpus.texts([]) == []


def test_rows_are_found_by_id_and_unknown_ids_are_left_out(corpus):
    assert corpus.rows_of(["d4", "d1", "d4", "nobody"]) == {"d4": 4, "d1": 1}
    assert corpus.rows_of([]) == {}


def test_texts_keep_every_field_in_the_order_asked_for(windows):
    assert windows.windows() == WINDOWS
    assert windows.windows([2, 0, 2]) == [WINDOWS[2], WINDOWS[0], WINDOWS[2]]
    assert (len(windows), windows.windows(np.array([1]))[0].gold) == (3, ())


def test_more_rows_than_one_batch_holds_are_all_there(tmp_path):
    count = 2 * ROWS_PER_BATCH + 1
    assert write_documents(tmp_path / "a", (Document(str(i), str(i), "all", "s") for i in range(count))) == count
    corpus = CorpusStore(tmp_path / "a")
    assert [doc.id for doc in corpus.iterate()] == [str(i) for i in range(count)]
    assert corpus.texts([count - 1, ROWS_PER_BATCH]) == [str(count - 1), str(ROWS_PER_BATCH)]


def test_an_open_corpus_holds_no_descriptors_however_many_shards_it_has(tmp_path):
    ids = [np.arange(3, dtype=np.uint16), np.arange(2, dtype=np.uint16)]
    for number, of_shard in enumerate([ids, [], ids]):
        documents = [Document(f"d{number}-{row}", "x", "all", "s") for row in range(len(of_shard))]
        (tmp_path / "documents").mkdir(exist_ok=True)
        shard = tmp_path / "documents" / f"{number:05d}.arrow"
        write_rows(shard, DOCUMENT_SCHEMA, documents)
        write_token_ids(shard, of_shard, np.dtype(np.uint16))
    write_token_rules(tmp_path / "documents", "f")
    before = len(list(Path("/proc/self/fd").iterdir()))
    corpus = CorpusStore(tmp_path / "documents")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [row.tolist() for row in corpus.token_ids([3, 0, 2])] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_system_without_descriptors_is_not_called_a_damaged_corpus(tmp_path, monkeypatch):
    write_documents(tmp_path / "documents", DOCUMENTS)
    write_token_ids(tmp_path / "documents/00000.arrow", [np.arange(3)] * 5, np.dtype(np.uint16))
    write_token_rules(tmp_path / "documents", "f")

    def refuse(path: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(
        RunError, match=r"00000\.tokens\.npy cannot be read: Too many open files; this is a limit of the"
    ):
        _open_tokens(tmp_path / "documents", [tmp_path / "documents/00000.arrow"])
