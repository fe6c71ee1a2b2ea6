"""Rows come back from Arrow files in the order asked for."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import replug.data.prepare.assembly
from replug.data.folder import Folder
from replug.data.prepare.assembly import write_ids_of_shard
from replug.data.prepare.sets import import_corpus
from replug.data.records import Document, Example
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    read_documents_of,
    shard_paths,
    write_examples,
    write_rows,
    write_token_ids,
    write_token_rules,
)
from replug.data.store import CorpusStore, ExampleStore
from replug.models.encoder import Encoder
from replug.models.packaged import resolve_encoder_path
from tests.support.preparing import contents, prepare, rows_of, write_jsonl

EXAMPLES = [
    Example("q0", "one", " two", "all", "s", ("d1", "d0")),
    Example("q1", "three", " four\n", "all"),
    Example("q2", "中", "🙂", "x", None, ("d2",)),
]


def test_texts_keep_every_field_in_the_order_asked_for(tmp_path):
    write_examples(tmp_path / "queries.arrow", EXAMPLES)
    examples = ExampleStore(tmp_path / "queries.arrow")
    assert examples.examples() == EXAMPLES
    assert examples.examples([2, 0, 2]) == [EXAMPLES[2], EXAMPLES[0], EXAMPLES[2]]
    assert (len(examples), examples.examples(np.array([1]))[0].gold, examples.has_queries) == (3, (), False)
    asked = [replace(EXAMPLES[0], query="what?", candidates=("a", "b")), EXAMPLES[1]]
    write_examples(tmp_path / "asked.arrow", asked, ("query", "candidates"))
    examples = ExampleStore(tmp_path / "asked.arrow")
    assert (examples.examples(), examples.has_queries) == (asked, True)
    assert [example.query for example in examples.examples()] == ["what?", "three"]


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


def test_a_title_is_embedded_before_the_text_that_the_lm_reads_alone(tmp_path, monkeypatch, encoder) -> None:
    monkeypatch.setattr("replug.data.shards.ROWS_PER_SHARD", 2)  # the second shard has no title
    rows = [{"id": f"d{i}", "text": f"text {i}", "title": title} for i, title in enumerate(["Bern", "", None])]
    write_jsonl(tmp_path / "corpus.jsonl", rows)
    corpus = import_corpus(tmp_path / "corpus.jsonl", tmp_path / "set", {"title": "embedded_title"}).corpus
    assert corpus.texts([2, 0]) == ["text 2", "text 0"]
    expected = ["Bern text 0", "text 1", "text 2"]  # title + " " + text
    ids = [list(row) for row in encoder.token_ids(expected)]
    assert [list(row) for row in encoder.document_ids(corpus, [0, 1, 2])] == ids
    write_ids_of_shard(tmp_path / "set/documents/00000.arrow", encoder.token_rule)
    write_ids_of_shard(tmp_path / "set/documents/00001.arrow", encoder.token_rule)
    write_token_rules(tmp_path / "set/documents", encoder.token_rule.fingerprint)
    prepared = CorpusStore(tmp_path / "set/documents")
    assert [list(row) for row in prepared.token_ids([0, 1, 2])] == ids
    assert import_corpus(tmp_path / "corpus.jsonl", tmp_path / "whole").corpus.texts([0]) == ["Bern\ntext 0"]


ODD = ["[SEP] a [MASK] b", "é e\u0301 中文 🙂", "\u200d\ufeff x", "UPPER lower", "bada gafu \x01 kelo"]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(resolve_encoder_path("package:minilm"))


def odd_rows(copies: int) -> list[dict]:
    return [{"id": f"odd{i}", "text": (text + " ") * (i + 2)} for i, text in enumerate(ODD * copies)]


def test_documents_and_token_ids_come_in_the_order_asked_for_over_all_shards(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(replug.data.prepare.assembly, "PIECES_PER_SHARD", 80)
    source = write_jsonl(tmp_path / "raw.jsonl", [*rows_of(60), *odd_rows(12)])
    made = prepare(tmp_path / "set", source, token_ids=encoder.token_rule)
    corpus, shards = made.corpus, shard_paths(made.corpus_path)
    every = [doc for shard in shards for doc in read_documents_of(shard)]
    assert len(shards) > 4 and list(corpus.iterate()) == every
    assert corpus.tokens_by == encoder.token_rule.fingerprint
    rows = np.random.default_rng(0).integers(0, len(corpus), 700)
    for chosen in (rows, rows.tolist(), range(len(corpus)), [len(corpus) - 1, 0, 0], []):
        assert corpus.documents(chosen) == [every[row] for row in chosen]
        assert corpus.texts(chosen) == [every[row].text for row in chosen]
        assert corpus.sources(chosen) == [every[row].source for row in chosen]
        found = corpus.token_ids(chosen)
        assert [ids.tolist() for ids in found] == [list(ids) for ids in encoder.token_ids(corpus.texts(chosen))]
        assert all(ids.dtype == np.uint16 for ids in found)
    wanted = {every[7].id: 7, every[-1].id: len(every) - 1}
    assert corpus.rows_of([*wanted, "no such id"]) == wanted


@pytest.mark.parametrize("has_ids", [True, False])
def test_another_retriever_over_an_unfinished_set_mixes_no_token_ids(has_ids, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(replug.data.prepare.assembly, "PIECES_PER_SHARD", 40)  # several shards
    now = Encoder(resolve_encoder_path("stand_in"), max_tokens=4).token_rule if has_ids else None
    source = write_jsonl(tmp_path / "raw.jsonl", [*rows_of(20), *odd_rows(3)])
    expected = contents(prepare(tmp_path / "quiet", source, token_ids=now).folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Folder, "finish", Mock(side_effect=KeyboardInterrupt))
        prepare(tmp_path / "begun", source, token_ids=encoder.token_rule)
    assert contents(prepare(tmp_path / "begun", source, token_ids=now).folder) == expected
