"""Planted overlaps of the corpus, the training texts and the held-out texts are all found."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.prepare.disjoint import (
    prove_disjoint,
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


def prove_files(folder: Path, documents: list, queries: list, heldout: list, n: int | None = None) -> tuple:
    """Shared sources and equal texts by the proof that needs no more memory for more texts, over written files."""
    examples = write_overlap_filter(folder / "examples", [*queries, *heldout], n, seed=0)
    assert len(examples.sources) == len({example.source or "" for example in [*queries, *heldout]})
    between = prove_examples(queries, write_overlap_filter(folder / "heldout", heldout, n, seed=0), seed=0)
    write_documents(folder / "documents", documents)
    within = prove_shard(folder / "documents" / "00000.arrow", folder / "examples", seed=0)
    return between[0] + within[0], between[1] + within[1]


def test_the_proof_of_a_clean_set_holds_and_counts_what_was_compared():
    proof = prove_disjoint(iter(DOCUMENTS), QUERIES, HELDOUT)
    assert proof.holds
    assert (proof.num_documents, proof.num_queries, proof.num_heldout) == (2, 2, 1)
    require_disjoint(proof)


PLANTED = {
    "document and query of one source": ([document(source="s3")], [], [], "planted and text q1"),
    "document and held-out text of one source": ([document(source="s5")], [], [], "planted and text h1"),
    "query and held-out text of one source": ([], [example(source="s5")], [], "planted and held-out text h1"),
}


@pytest.mark.parametrize(("documents", "queries", "heldout", "says"), PLANTED.values(), ids=PLANTED)
def test_a_shared_source_is_found(documents, queries, heldout, says, tmp_path):
    splits = DOCUMENTS + documents, QUERIES + queries, HELDOUT + heldout
    proof = prove_disjoint(*splits)
    assert not proof.holds
    assert (len(proof.shared_sources), proof.equal_texts) == (1, ())
    assert says in proof.shared_sources[0]
    shared, equal = prove_files(tmp_path, *splits)
    assert (len(shared), equal) == (1, [])
    assert shared[0].split()[1] == says.split()[0]


EQUAL = {
    "document equal to a query": ([document("one two three four")], [], [], "planted equals text q1"),
    "white space and case aside": ([document("\tONE  two\n\nThree four ")], [], [], "planted equals text q1"),
    "document equal to a query's continuation": ([document("seven eight")], [], [], "planted equals text q2"),
    "document equal to a held-out text": ([document("nine ten eleven twelve")], [], [], "planted equals text h1"),
    "document equal to a held-out continuation": ([document("Eleven  Twelve")], [], [], "planted equals text h1"),
    "query equal to a held-out text": ([], [example("nine ten", " eleven twelve")], [], "planted equals held-out"),
    "held-out text equal to a query": ([], [], [example("ONE", " two three  four")], "q1 equals held-out text planted"),
}


@pytest.mark.parametrize(("documents", "queries", "heldout", "says"), EQUAL.values(), ids=EQUAL)
def test_an_equal_text_is_found(documents, queries, heldout, says, tmp_path):
    splits = DOCUMENTS + documents, QUERIES + queries, HELDOUT + heldout
    proof = prove_disjoint(*splits)
    assert not proof.holds
    assert (proof.shared_sources, len(proof.equal_texts)) == ((), 1)
    assert says in proof.equal_texts[0]
    shared, equal = prove_files(tmp_path, *splits)
    assert (shared, len(equal)) == ([], 1)
    assert equal[0].split()[1] == says.split()[0]


def test_a_document_may_equal_a_context_for_it_tells_nothing_of_the_continuation():
    assert prove_disjoint([document("one two")], QUERIES, HELDOUT).holds


def test_every_overlap_is_listed_and_the_first_three_are_named():
    copies = [Document(f"copy{i}", "one two three four", "all", f"c{i}") for i in range(4)]
    proof = prove_disjoint(copies, QUERIES, HELDOUT)
    assert len(proof.equal_texts) == 4
    with pytest.raises(UserError, match="overlap in 4 places") as caught:
        require_disjoint(proof)
    assert [f"copy{i}" in str(caught.value) for i in range(4)] == [True, True, True, False]
