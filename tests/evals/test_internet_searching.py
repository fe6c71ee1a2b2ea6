"""What the local engine finds: as any method of evaluations does, and never a document that shares no word."""

import logging

import numpy as np
import pytest

from replug.config.load import load_evaluation_config
from replug.config.methods import Method
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.internet_qa import CorpusEngine, find_for_all, searches
from replug.web.records import FoundEvidence
from tests.support.command_line import ROOT
from tests.support.known_lm import KnownTexts

TEXTS = ["Ada was a poet.", "Bo was a baker.", "Nobody."]


def engine(source: str):
    found = RetrievedDocuments(np.array([[1, 0, 2], [0, 1, 2]]), np.array([[3.0, 1.0, 0.0], [2.0, 0.0, -1.0]]))
    method = Method("search", source, 3, False)
    book = EvidenceBook([method], KnownTexts(TEXTS), {source: found}, [True, True])
    return CorpusEngine(method, book, ["who baked?", "who wrote?"])


def test_documents_are_results_with_their_texts_and_ids_best_first():
    [first, second] = engine("bm25").search("who baked?", 20)
    assert (first.doc_id, first.rank, first.text, first.similarity) == ("d1", 1, TEXTS[1], 3.0)
    assert (second.doc_id, second.rank, second.url) == ("d0", 2, "document:d0")
    assert [result.doc_id for result in engine("bm25").search("who wrote?", 20)] == ["d0"], "the others share no word"
    assert [result.doc_id for result in engine("bm25").search("who baked?", 1)] == ["d1"]


def test_a_retriever_finds_documents_of_any_similarity():
    assert [result.doc_id for result in engine("replug").search("who wrote?", 20)] == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], [Method("search", "bm25", 20, False)]),
        (["retriever.path=given", "web.num_results=5"], [Method("search", "replug", 5, False)]),
        (["methods=[none,gold]"], []),
        (["web.engine=ddgs"], []),
    ],
)
def test_a_corpus_is_searched_where_a_method_reranks_and_the_engine_is_local(overrides, found):
    assert searches(load_evaluation_config(ROOT / "configs/eval_internet_nq.yaml", ["lm.path=x", *overrides])) == found


class Finder:
    """Finds nothing, and says why."""

    def find(self, question: str) -> FoundEvidence:
        return FoundEvidence(question, (), {"engine_429": 1, "http_404": 2})


def test_questions_without_a_passage_are_told_with_what_went_wrong(caplog):
    with caplog.at_level(logging.WARNING):
        found = find_for_all(Finder(), {"a": "who?", "b": "what?"})
    assert found["b"].question == "what?"
    assert "2 of 2 questions have no passage" in caplog.text and "http_404 4, engine_429 2" in caplog.text
