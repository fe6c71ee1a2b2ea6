"""Raw texts and the user's rows to a prepared set: the same every time, and disjoint."""

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

import data.prepare
from configs.errors import UserError
from configs.schema import DataConfig
from data.prepare import FILES, prepare_raw, prepare_rows, require_same_origin, side_of
from data.sources import FieldMap, read_source
from data.store import PreparedSet

SHARES = (0.2, 0.1)  # the schema's


def words(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\s*\S+|\s+", text)]


def prepare(out: Path, seed: int = 0, **keys: object) -> PreparedSet:
    return prepare_raw(DataConfig(**{"source": "stand_in", "window": 16} | keys), seed, words, out, {"seed": seed})


def ids_of(side: str, count: int) -> list[str]:
    """Ids of source texts that fall on a side with seed 0."""
    return [name for name in map(str, range(1000)) if side_of(name, 0, *SHARES) == side][:count]


def prepare_texts(tmp_path: Path, texts: dict[str, str], **keys: object) -> PreparedSet:
    rows = [json.dumps({"id": name, "text": text}) for name, text in texts.items()]
    (tmp_path / "raw.jsonl").write_text("\n".join(rows))
    return prepare(tmp_path / "set", source=str(tmp_path / "raw.jsonl"), **{"window": 2} | keys)


def contents(prepared: PreparedSet) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.folder.iterdir()}


# Which side a text serves -------------------------------------------------------------------------------


def test_the_side_is_a_keyed_hash_of_the_id():
    for name in ("a", "text-7", "中🙂"):
        digest = hashlib.blake2b(name.encode(), digest_size=8, key=b"side:3").digest()
        point = int.from_bytes(digest, "big") / 2**64
        expected = "queries" if point < 0.5 else "heldout" if point < 0.75 else "corpus"
        assert side_of(name, 3, 0.5, 0.25) == expected


def test_the_sides_get_their_shares():
    counts = Counter(side_of(str(i), 0, *SHARES) for i in range(10_000))
    assert abs(counts["queries"] - 2000) < 160  # four standard deviations
    assert abs(counts["heldout"] - 1000) < 120


def test_another_seed_puts_texts_on_other_sides():
    sides = [[side_of(str(i), seed, *SHARES) for i in range(100)] for seed in (0, 1)]
    assert sides[0] != sides[1]


# Raw texts ----------------------------------------------------------------------------------------------


def test_the_same_texts_give_the_same_files_byte_for_byte(tmp_path):
    first, second = prepare(tmp_path / "a"), prepare(tmp_path / "b")
    assert contents(first) == contents(second)
    assert contents(prepare(tmp_path / "c", seed=1)) != contents(first)


def test_preparing_again_over_an_earlier_set_replaces_it(tmp_path):
    prepare(tmp_path / "a", seed=1)
    assert contents(prepare(tmp_path / "a")) == contents(prepare(tmp_path / "b"))


def test_the_order_of_the_source_texts_changes_nothing(tmp_path):
    texts = [(text.id, text.text) for text in read_source("stand_in", FieldMap())]
    shuffled = random.Random(0).sample(texts, len(texts))
    sets = []
    for name, order in (("a", texts), ("b", shuffled)):
        (tmp_path / name).mkdir()
        sets.append(contents(prepare_texts(tmp_path / name, dict(order), window=16)))
    assert sets[0] == sets[1]


def test_no_source_is_on_two_sides_and_the_proof_says_so(tmp_path):
    prepared = prepare(tmp_path / "a")
    corpus, queries, heldout = (
        {row.source for row in rows}
        for rows in (prepared.corpus.iterate(), prepared.queries.windows(), prepared.heldout.windows())
    )
    assert corpus and queries and heldout
    assert not (corpus & queries or corpus & heldout or queries & heldout)
    proof = prepared.manifest["disjoint"]
    assert (proof["shared_sources"], proof["equal_texts"]) == ([], [])
    assert proof["num_documents"] == len(prepared.corpus)


def test_documents_and_texts_are_parts_of_their_source_and_as_long_as_asked(tmp_path):
    prepared = prepare(tmp_path / "a", window=8, document_tokens=12)
    sources = {text.id: text for text in read_source("stand_in", FieldMap())}
    for doc in prepared.corpus.iterate():
        assert doc.text in sources[doc.source].text
        assert (len(doc.text.split()) <= 12, doc.domain) == (True, sources[doc.source].domain)
    for window in prepared.queries.windows() + prepared.heldout.windows():
        assert window.context + window.continuation in sources[window.source].text
        assert (len(window.context.split()), len(window.continuation.split())) == (8, 8)
        assert window.domain == sources[window.source].domain


def test_each_side_is_trimmed_to_the_number_asked_for(tmp_path):
    prepared = prepare(tmp_path / "a", num_documents=50, num_queries=20, num_heldout=7)
    assert (len(prepared.corpus), len(prepared.queries), len(prepared.heldout)) == (50, 20, 7)
    assert prepared.manifest["counts"] == {"documents": 50, "queries": 20, "heldout": 7}


def test_a_smaller_set_is_a_part_of_the_larger_one(tmp_path):
    large, small = prepare(tmp_path / "a", num_queries=20), prepare(tmp_path / "b", num_queries=5)
    assert small.queries.windows() == large.queries.windows()[:5]


def test_domains_are_counted_in_the_manifest(tmp_path):
    prepared = prepare(tmp_path / "a")
    counted = Counter(window.domain for window in prepared.queries.windows())
    assert prepared.manifest["domains"]["queries"] == dict(counted)
    assert set(counted) == {"even", "odd"}


def test_texts_are_cut_into_documents_and_pairs_by_hand(tmp_path):
    (doc,), (query,), (held,) = ids_of("corpus", 1), ids_of("queries", 1), ids_of("heldout", 1)
    texts = {doc: "a b c d e", query: "f g h i j k l m n", held: "o p q r s"}
    prepared = prepare_texts(tmp_path, texts)
    assert sorted((d.id, d.text) for d in prepared.corpus.iterate()) == [
        (f"{doc}#0", "a b"),
        (f"{doc}#1", " c d"),
        (f"{doc}#2", " e"),
    ]
    # the last piece of a text is short, so no pair ends in it
    assert sorted((w.id, w.context, w.continuation) for w in prepared.queries.windows()) == [
        (f"{query}#0", "f g", " h i"),
        (f"{query}#1", " j k", " l m"),
    ]
    assert [(w.context, w.continuation) for w in prepared.heldout.windows()] == [("o p", " q r")]


def test_planted_duplicates_are_dropped_and_counted(tmp_path):
    docs, queries, helds = ids_of("corpus", 3), ids_of("queries", 3), ids_of("heldout", 3)
    texts = {
        docs[0]: "a b c d",  # a b | c d
        docs[1]: "C  D e f",  # the first repeats c d | e f
        docs[2]: "g h  ",  # g h | blank
        queries[0]: "x1 y1 A B z",  # its continuation is a document
        queries[1]: "x2 y2 u2 v2 z",
        queries[2]: "x3 y3 u3 v3 z",
        helds[0]: "X2 y2 u2 v2 z",  # equals a query
        helds[1]: "x4 y4 e f z",  # its continuation is a document
        helds[2]: "x5 y5 u5 v5 z",
    }
    prepared = prepare_texts(tmp_path, texts)
    assert sorted(doc.text.strip() for doc in prepared.corpus.iterate()) == ["a b", "c d", "e f", "g h"]
    assert {w.source for w in prepared.queries.windows()} == set(queries[1:])
    assert {w.source for w in prepared.heldout.windows()} == {helds[2]}
    assert prepared.manifest["dropped"] == {
        "blank document": 1,
        "repeated document": 1,
        "query equal to a document": 1,
        "held-out text equal to another side's": 2,
    }


# The manifest -------------------------------------------------------------------------------------------


def test_the_manifest_holds_each_files_checksum(tmp_path):
    prepared = prepare(tmp_path / "a")
    sums = {name: hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest() for name in FILES}
    assert prepared.manifest["files"] == sums
    assert prepared.corpus_sha256 == sums["documents.arrow"]


def test_a_set_serves_only_what_it_was_made_from(tmp_path):
    prepared = prepare(tmp_path / "a", seed=3)
    assert require_same_origin(prepared, {"seed": 3}) is prepared
    with pytest.raises(UserError, match="a was prepared with seed=3, now it is 4: remove the folder or give another"):
        require_same_origin(prepared, {"seed": 4})
    with pytest.raises(UserError, match=r"prepared with data\.window=None, now it is 16"):
        require_same_origin(prepared, {"seed": 3, "data.window": 16})


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data.prepare, "write_json", killed)
        prepare(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(FILES)
    with pytest.raises(UserError, match="not a prepared set"):
        PreparedSet(tmp_path / "a")
    assert contents(prepare(tmp_path / "a")) == contents(prepare(tmp_path / "b"))  # and is made anew


def test_a_set_killed_while_its_manifest_was_written_is_made_anew(tmp_path):
    prepare(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").rename(tmp_path / "a" / "manifest.json.partial")
    assert contents(prepare(tmp_path / "a")) == contents(prepare(tmp_path / "b"))


# The user's rows ----------------------------------------------------------------------------------------

ROWS = {
    "corpus": [
        {"id": "d0", "title": "Title 中", "text": "text 🙂\r\n e\u0301 \u2028 end", "domain": "x", "source": "s0"},
        {"id": "d1", "text": "  plain\t"},
    ],
    "queries": [{"id": "q0", "context": "Übung", "continuation": " macht\n𝒳", "gold": ["d1", "d0"], "domain": "x"}],
    "heldout": [{"context": "one", "continuation": " two"}],
}


def prepare_own(tmp_path: Path, rows: dict[str, list[dict]]) -> PreparedSet:
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return prepare_rows(*(tmp_path / f"{name}.jsonl" for name in rows), tmp_path / "set", {})


def test_the_users_rows_come_back_as_they_were_with_titles_before_the_text(tmp_path):
    prepared = prepare_own(tmp_path, ROWS)
    first, second = prepared.corpus.documents([0, 1])
    assert first.text == "Title 中\ntext 🙂\r\n e\u0301 \u2028 end"
    assert (first.domain, first.source) == ("x", "s0")
    assert (second.id, second.text, second.domain, second.source) == ("d1", "  plain\t", "all", "d1")
    (query,) = prepared.queries.windows()
    assert (query.context, query.continuation, query.gold) == ("Übung", " macht\n𝒳", ("d1", "d0"))
    (held,) = prepared.heldout.windows()
    assert (held.id, held.source, held.gold) == ("0", None, ())


def test_a_refused_overlap_leaves_no_set_and_the_mended_rows_go_there(tmp_path):
    leak = [{"id": "copy", "text": "ONE two"}]
    with pytest.raises(UserError, match="document copy equals text 0"):
        prepare_own(tmp_path, ROWS | {"corpus": leak})
    with pytest.raises(UserError, match="not a prepared set"):
        PreparedSet(tmp_path / "set")
    assert len(prepare_own(tmp_path, ROWS).corpus) == 2


def test_the_users_duplicates_on_one_side_are_left_alone(tmp_path):
    twice = [{"id": "a", "text": "same"}, {"id": "b", "text": "same"}]
    assert (
        len(prepare_own(tmp_path, ROWS | {"corpus": twice, "queries": [{"context": "c", "continuation": "d"}]}).corpus)
        == 2
    )
