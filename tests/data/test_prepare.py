"""Raw texts and the user's rows to a prepared set: the same every time, and disjoint; a planted overlap is found."""

from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.data.files import file_sha256
from replug.data.prepare.sets import prepare_rows
from replug.data.sampling import QuerySampler, split_of
from replug.data.store import PreparedSet
from tests.support.preparing import SHARES, debug_set, ids_on, prepare, rows_of, texts_of, write_jsonl


def prepare_texts(tmp_path: Path, texts: dict[str, str]) -> PreparedSet:
    source = write_jsonl(tmp_path / "raw.jsonl", ({"id": name, "text": text} for name, text in texts.items()))
    return prepare(tmp_path / "set", source, context_tokens=2)


# Which split a text serves -------------------------------------------------------------------------------


def test_texts_are_dealt_as_they_always_were():
    dealt = {i: split_of(f"text-{i}", 0, SHARES) for i in range(40)}
    assert [i for i in dealt if dealt[i] == "queries"] == [0, 4, 5, 10, 16, 18, 21, 24, 27, 32, 36, 38]
    assert [i for i in dealt if dealt[i] == "heldout"] == [11, 37]


# Raw texts ----------------------------------------------------------------------------------------------


def test_texts_are_cut_into_documents_and_pairs_by_hand(tmp_path):
    (doc,), (query,), (held,) = ids_on("documents", 1), ids_on("queries", 1), ids_on("heldout", 1)
    texts = {doc: "a b c d e", query: "f g h i j k l m n", held: "o p q r s"}
    prepared = prepare_texts(tmp_path, texts)
    assert sorted((d.id, d.text) for d in prepared.corpus.iterate()) == [
        (f"{doc}#0", "a b"),
        (f"{doc}#1", " c d"),
        (f"{doc}#2", " e"),
    ]
    # the last piece of a text is short, so no pair ends in it
    assert sorted((w.id, w.context, w.continuation) for w in prepared.queries.examples()) == [
        (f"{query}#0", "f g", " h i"),
        (f"{query}#1", " j k", " l m"),
    ]
    assert [(w.context, w.continuation) for w in prepared.heldout.examples()] == [("o p", " q r")]


def test_planted_duplicates_are_dropped_and_counted(tmp_path):
    docs, queries, helds = ids_on("documents", 3), ids_on("queries", 4), ids_on("heldout", 3)
    texts = {
        docs[0]: "a b c d",  # a b | c d, the first is a query's continuation
        docs[1]: "C  D e f",  # the first repeats c d, the second is a held-out continuation
        docs[2]: "g h  ",  # g h | blank
        queries[0]: "x1 y1 A B z",
        queries[1]: "x2 y2 u2 v2 z",  # equals a held-out text
        queries[2]: "x3 y3 u3 v3 z",
        queries[3]: "x6 y6 U5 v5 z",  # its continuation is a held-out text's
        helds[0]: "X2 y2 u2 v2 z",
        helds[1]: "x4 y4 e f z",
        helds[2]: "x5 y5 u5 v5 z",
    }
    prepared = prepare_texts(tmp_path, texts)
    assert sorted(doc.text.strip().casefold() for doc in prepared.corpus.iterate()) == ["c d", "g h"]
    assert {w.source for w in prepared.queries.examples()} == {queries[0], queries[2]}
    assert {w.source for w in prepared.heldout.examples()} == set(helds)
    assert prepared.manifest["dropped"] == {
        "blank document": 1,
        "repeated document": 1,
        "document equal to another split's text": 2,
        "query equal to another split's text": 2,
    }


# The user's rows ----------------------------------------------------------------------------------------

ROWS = {
    "corpus": [
        {"id": "d0", "title": "Title 中", "text": "text 🙂\r\n e\u0301 \u2028 end", "domain": "x", "source": "s0"},
        {"id": "d1", "text": "  plain\t"},
    ],
    "train": [{"id": "q0", "context": "Übung", "continuation": " macht\n𝒳", "gold": ["d1", "d0"], "domain": "x"}],
    "heldout": [{"context": "one", "continuation": " two"}],
    "dev": [{"id": "v0", "context": "three", "continuation": " four", "source": "s9"}],
}


def prepare_own(tmp_path: Path, rows: dict[str, list[dict]]) -> PreparedSet:
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", lines) for name, lines in rows.items()}
    inputs: dict[str, object] = {path.name: file_sha256(path) for path in paths.values()}
    return prepare_rows(**paths, out=tmp_path / "set", inputs=inputs)


def test_the_users_rows_come_back_as_they_were_with_titles_before_the_text(tmp_path):
    prepared = prepare_own(tmp_path, ROWS)
    first, second = prepared.corpus.documents([0, 1])
    assert first.text == "Title 中\ntext 🙂\r\n e\u0301 \u2028 end"
    assert (first.domain, first.source) == ("x", "s0")
    assert (second.id, second.text, second.domain, second.source) == ("d1", "  plain\t", "all", "d1")
    (query,) = prepared.queries.examples()
    assert (query.context, query.continuation, query.gold) == ("Übung", " macht\n𝒳", ("d1", "d0"))
    (held,) = prepared.heldout.examples()
    assert (held.id, held.source, held.gold) == ("0", None, ())
    assert [example.id for example in prepared.require_dev().examples()] == ["v0"]
    assert prepared.manifest["counts"] == {"documents": 2, "queries": 1, "heldout": 1, "dev": 1}


def document(text: str = "another text", source: str = "s9", name: str = "planted") -> dict:
    return {"id": name, "text": text, "source": source}


def example(
    context: str = "some other", continuation: str = " words", source: str = "s9", name: str = "planted"
) -> dict:
    return {"id": name, "context": context, "continuation": continuation, "source": source}


OWN = {
    "corpus": [document("the first document", "s1", "d1"), document("the second document", "s2", "d2")],
    "train": [example("one two", " three four", "s3", "q1"), example("five six", " seven eight", "s4", "q2")],
    "heldout": [example("nine ten", " eleven twelve", "s5", "h1")],
    "dev": [example("thirteen", " fourteen", "s6", "v1")],
}
# A row that is planted in a split, and the row that is named for it.
PLANTED = [
    ("corpus", document(source="s3"), "document planted and .* both come from source s3"),
    ("corpus", document(source="s5"), "document planted and .* both come from source s5"),
    ("corpus", document(source="s6"), "document planted and .* both come from source s6"),
    ("train", example(source="s5"), "held-out text h1 and .* both come from source s5"),
    ("dev", example(source="s3"), "development text planted and .* both come from source s3"),
    ("corpus", document("\tONE  two\n\nThree four "), "document planted equals"),  # but for white space and case
    ("corpus", document("seven eight"), "document planted equals"),  # a continuation
    ("corpus", document("nine ten eleven twelve"), "document planted equals"),
    ("corpus", document("Eleven  Twelve"), "document planted equals"),
    ("train", example("nine ten", " eleven twelve"), "held-out text h1 equals"),
    ("heldout", example("ONE", " two three  four"), "held-out text planted equals"),
]


@pytest.mark.parametrize(("split", "row", "says"), PLANTED)
def test_a_planted_overlap_is_found_and_leaves_no_set_and_the_mended_rows_go_there(split, row, says, tmp_path):
    with pytest.raises(UserError, match=f"overlap in 1 places, so the result would be a leak: {says}"):
        prepare_own(tmp_path, OWN | {split: [*OWN[split], row]})
    with pytest.raises(UserError, match="holds no finished prepared set"):
        PreparedSet(tmp_path / "set")
    assert len(prepare_own(tmp_path, OWN).corpus) == 2


def test_a_document_may_equal_a_context_and_texts_may_have_one_continuation(tmp_path):
    planted = {"corpus": document("one two"), "heldout": example("another question", " three four", "s8")}
    prepare_own(tmp_path, OWN | {split: [*OWN[split], row] for split, row in planted.items()})


# Which texts make up a step ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_queries", "batch_size"), [(12, 4), (10, 4), (3, 8)])
def test_each_pass_takes_every_text_once_though_batches_run_over_its_end(num_queries, batch_size):
    sampler = QuerySampler(num_queries, batch_size, seed=0)
    rows = np.concatenate([sampler.rows(step) for step in range(20)]).tolist()
    passes = [rows[i : i + num_queries] for i in range(0, len(rows) - num_queries + 1, num_queries)]
    assert len(passes) >= 2
    assert all(sorted(one) == list(range(num_queries)) for one in passes)


# In a run directory -------------------------------------------------------------------------------------


def test_a_changed_key_is_refused_by_name_with_the_folder_to_remove(tmp_path):
    debug_set(tmp_path)
    with pytest.raises(UserError, match=rf"data\.num_queries is 9, but the .*{tmp_path}/set .* remove the folder"):
        debug_set(tmp_path, "data.num_queries=9")


# Development texts ----------------------------------------------------------------------------------------------------


def test_asking_for_development_texts_leaves_training_and_held_out_texts_as_they_were(tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", rows_of(120))
    without = prepare(tmp_path / "without", source, num_queries=20, num_heldout=10)
    with_dev = prepare(tmp_path / "with", source, num_queries=20, num_heldout=10, num_dev=10)
    before, after = texts_of(without), texts_of(with_dev)
    assert before["queries"] == after["queries"] and before["heldout"] == after["heldout"]
    assert len(after["documents"]) < len(before["documents"])
    with pytest.raises(UserError, match=r"no development texts; prepare a set with data\.num_dev"):
        without.require_dev()


def test_a_development_text_that_shares_words_with_a_held_out_text_is_dropped(tmp_path):
    rows = rows_of(450, words=8)
    for row in rows[::3]:  # of words that half of the sources share nothing is dropped
        row["text"] = f"some begin alike {row['text']}"
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    made = prepare(tmp_path / "set", source, num_dev=1000, num_heldout=1000, ngram_overlap=3)
    assert made.manifest["dropped"]["development text that shares 3 words with another split's text"] > 5


def test_a_whole_source_becomes_documents_beside_the_users_own_questions(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for number in range(6):
        text = f"# Town {number}\n\nIts bridge was built in {1500 + number} by many.\n"
        (folder / f"page{number}.md").write_text(text)
    write_jsonl(tmp_path / "train.jsonl", [{"question": "when was it built", "answers": ["1501"]}])
    write_jsonl(tmp_path / "heldout.jsonl", [{"question": "who says it was built in 1503", "answers": ["many"]}])
    keys = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "heldout")]
    prepared = debug_set(tmp_path, f"data.source={folder}", "data.ngram_overlap=2", *keys)
    assert {doc.source for doc in prepared.corpus.iterate()} == {f"page{number}.md" for number in range(6)}
    assert [example.query for example in prepared.queries.examples()] == ["when was it built"]
    assert [example.continuation for example in prepared.heldout.examples()] == [" many"]
    write_jsonl(tmp_path / "heldout.jsonl", [{"question": "when was it built", "answers": ["1501"]}])
    with pytest.raises(UserError, match="equals"):
        debug_set(tmp_path / "other", f"data.source={folder}", *keys)
