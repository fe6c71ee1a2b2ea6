"""A development set: a third range of source texts, beside held-out ones, that no other split shares a text with."""

import json
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.prepare.sets import prepare_rows
from replug.data.prepare.work import LocalPool
from replug.data.store import PreparedSet
from tests.support.preparing import prepare, rows_of, texts_of, write_jsonl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "texts.jsonl", rows_of(120))


@pytest.fixture(scope="module")
def with_dev(source: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return prepare(tmp_path_factory.mktemp("with_dev"), source, num_dev=10, num_queries=20, num_heldout=10)


def test_asking_for_development_texts_leaves_training_and_held_out_texts_as_they_were(source, with_dev, tmp_path):
    without = prepare(tmp_path, source, num_queries=20, num_heldout=10)
    before, after = texts_of(without), texts_of(with_dev)
    assert before["queries"] == after["queries"] and before["heldout"] == after["heldout"]
    assert len(after["documents"]) < len(before["documents"])
    with pytest.raises(UserError, match=r"no development texts; prepare a set with data\.num_dev"):
        without.require_dev()


def test_no_source_and_no_text_of_a_development_text_is_in_another_split(with_dev):
    dev = with_dev.require_dev().examples()
    others = {w.source for store in (with_dev.queries, with_dev.heldout) for w in store.examples()}
    others |= {doc.source for doc in with_dev.corpus.iterate()}
    assert len(dev) == 10 and not {example.source for example in dev} & others
    assert with_dev.manifest["disjoint"]["num_dev"] == 10
    assert with_dev.manifest["counts"]["dev"] == 10 and "dev.arrow" in with_dev.manifest["files"]


def test_a_development_text_that_shares_words_with_a_held_out_text_is_dropped(tmp_path):
    rows = rows_of(450)
    for row in rows[::3]:  # of words that half of the sources share nothing is dropped
        row["text"] = f"some begin alike {row['text']}"
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    made = prepare(tmp_path / "set", source, num_dev=1000, num_heldout=1000, ngram_overlap=3)
    assert made.manifest["dropped"]["development text that shares 3 words with another split's text"] > 5


def own_rows(folder: Path, dev_source: str) -> dict[str, Path]:
    example = {"context": "a b", "continuation": "c d"}
    rows = {
        "corpus": [{"id": "d", "text": "a document", "source": "s0"}],
        "train": [{"id": "q", **example, "source": "s1"}],
        "heldout": [{"id": "h", "context": "e", "continuation": "f", "source": "s2"}],
        "dev": [{"id": "v", "context": "g", "continuation": "h", "source": dev_source}],
    }
    return {name: write_jsonl(folder / f"{name}.jsonl", of) for name, of in rows.items()}


def test_own_development_rows_are_imported_and_an_overlap_is_refused(tmp_path):
    made = prepare_rows(**own_rows(tmp_path, "s3"), out=tmp_path / "set", inputs={}, pool=LocalPool(1))
    assert [example.id for example in made.require_dev().examples()] == ["v"]
    assert json.loads((tmp_path / "set/manifest.json").read_text())["counts"]["dev"] == 1
    with pytest.raises(UserError, match="query q and development text v both come from source s1"):
        prepare_rows(**own_rows(tmp_path, "s1"), out=tmp_path / "leak", inputs={}, pool=LocalPool(1))
    with pytest.raises(UserError, match="document d and text v both come from source s0"):
        prepare_rows(**own_rows(tmp_path, "s0"), out=tmp_path / "leak", inputs={}, pool=LocalPool(1))
