"""Planted overlaps of the corpus, the training texts and the held-out texts are all found."""

from pathlib import Path

import pytest

from replug.data.prepare.disjoint import (
    DisjointProof,
    prove_examples,
    prove_shard,
    require_disjoint,
    write_overlap_filter,
)
from replug.data.records import Document, Example
from replug.data.shards import write_documents

DOCUMENTS = [Document("d1", "the first document", "all", "s1"), Document("d2", "the second document", "all", "s2")]
QUERIES = [Example("q1", "one two", " three four", "all", "s3"), Example("q2", "five six", " seven eight", "all", "s4")]
HELDOUT = [Example("h1", "nine ten", " eleven twelve", "all", "s5")]


def document(text: str = "another text", source: str = "s9") -> Document:
    return Document("planted", text, "all", source)


def example(context: str = "some other", continuation: str = " words", source: str | None = "s9") -> Example:
    return Example("planted", context, continuation, "all", source)


def prove(folder: Path, documents: list, queries: list, heldout: list) -> DisjointProof:
    """Compare written files, queries with held-out texts and documents with both."""
    examples = write_overlap_filter(folder / "examples", [*queries, *heldout], None, seed=0)
    assert len(examples.sources) == len({example.source or "" for example in [*queries, *heldout]})
    of_heldout = write_overlap_filter(folder / "heldout", heldout, None, seed=0)
    between = prove_examples(queries, of_heldout, 0, "query")
    write_documents(folder / "documents", documents)
    within = prove_shard(folder / "documents" / "00000.arrow", folder / "examples", seed=0)
    overlaps = (tuple(a + b) for a, b in zip(between, within, strict=True))
    return DisjointProof(len(documents), len(queries), len(heldout), *overlaps)


def test_the_proof_of_a_clean_set_holds(tmp_path):
    require_disjoint(prove(tmp_path, DOCUMENTS, QUERIES, HELDOUT))


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
    proof = prove(tmp_path, DOCUMENTS + documents, QUERIES + queries, HELDOUT + heldout)
    assert (len(proof.shared_sources), len(proof.equal_texts)) == ((1, 0) if kind in SHARED else (0, 1))
    [overlap] = [*proof.shared_sources, *proof.equal_texts]
    assert overlap.split()[1] == ("q1" if heldout else "planted")


def test_a_document_may_equal_a_context_and_texts_may_have_one_continuation(tmp_path):
    same_answer = example("another question", " three four", "s8")
    assert prove(tmp_path, [document("one two")], QUERIES, [*HELDOUT, same_answer]).holds
