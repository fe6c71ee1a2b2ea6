"""Planted overlaps of the corpus, the training texts and the held-out texts are all found."""

from pathlib import Path

import pytest

from replug.data.prepare.assembly import overlaps_of_examples, overlaps_of_shard, write_overlap_filter
from replug.data.records import Document, Example
from replug.data.shards import write_documents, write_examples

DOCUMENTS = [Document("d1", "the first document", "all", "s1"), Document("d2", "the second document", "all", "s2")]
QUERIES = [Example("q1", "one two", " three four", "all", "s3"), Example("q2", "five six", " seven eight", "all", "s4")]
HELDOUT = [Example("h1", "nine ten", " eleven twelve", "all", "s5")]


def document(text: str = "another text", source: str = "s9") -> Document:
    return Document("planted", text, "all", source)


def example(context: str = "some other", continuation: str = " words", source: str | None = "s9") -> Example:
    return Example("planted", context, continuation, "all", source)


def found(folder: Path, documents: list, queries: list, heldout: list) -> tuple[list[str], list[str]]:
    """Return shared sources and equal texts of written files: of queries and held-out texts, of documents and both."""
    texts = [*queries, *heldout]
    known = write_overlap_filter(folder / "texts", lambda: texts, None, seed=0)
    assert len(known.sources) == len({example.source for example in texts})
    of_heldout = write_overlap_filter(folder / "heldout", lambda: heldout, None, seed=0)
    write_examples(folder / "queries.arrow", queries)
    between = overlaps_of_examples(folder / "queries.arrow", of_heldout, 0, "query")
    write_documents(folder / "documents", documents)
    within = overlaps_of_shard(folder / "documents" / "00000.arrow", folder / "texts", seed=0)
    return between[0] + within[0], between[1] + within[1]


SHARED = {
    "document and query of one source": ([document(source="s3")], [], []),
    "document and held-out text of one source": ([document(source="s5")], [], []),
    "query and held-out text of one source": ([], [example(source="s5")], []),
}
EQUAL = {
    "document equal to a query": ([document("one two three four")], [], []),
    "white space and case aside": ([document("\tONE  two\n\nThree four ")], [], []),
    "document equal to a query's continuation": ([document("seven eight")], [], []),
    "document equal to a held-out text": ([document("nine ten eleven twelve")], [], []),
    "document equal to a held-out continuation": ([document("Eleven  Twelve")], [], []),
    "query equal to a held-out text": ([], [example("nine ten", " eleven twelve")], []),
    "held-out text equal to a query": ([], [], [example("ONE", " two three  four")]),
}


@pytest.mark.parametrize("kind", [*SHARED, *EQUAL])
def test_a_planted_overlap_is_found_and_named(kind, tmp_path):
    documents, queries, heldout = {**SHARED, **EQUAL}[kind]
    shared, equal = found(tmp_path, DOCUMENTS + documents, QUERIES + queries, HELDOUT + heldout)
    assert (len(shared), len(equal)) == ((1, 0) if kind in SHARED else (0, 1))
    assert [*shared, *equal][0].split()[1] == ("q1" if heldout else "planted")


def test_a_document_may_equal_a_context_and_texts_may_have_one_continuation(tmp_path):
    same_answer = example("another question", " three four", "s8")
    assert found(tmp_path, [*DOCUMENTS, document("one two")], QUERIES, [*HELDOUT, same_answer]) == ([], [])
