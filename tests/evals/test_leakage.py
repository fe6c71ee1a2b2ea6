"""What the corpus holds of examples, against documents made for it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig, PaperConfig
from replug.config.methods import parse_methods
from replug.data.records import Document, Example
from replug.data.shards import write_documents
from replug.data.store import CorpusStore
from replug.evals.comparison import compare, markdown_table
from replug.evals.evidence import RetrievedDocuments
from replug.evals.leakage import (
    ComparedTexts,
    find_overlaps,
    overlap_lines,
    overlaps_with,
    write_leakage,
)
from replug.evals.search import find_all, find_others, require_sources
from replug.evals.tasks.lm import LanguageModelling
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate


def words(seed: int, num: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10**9)}" for _ in range(num))


def document(name: str, text: str, source: str | None = None) -> Document:
    return Document(name, text, "all", source or name)


LONG, OTHER, SHORT = words(1, 40), words(2, 40), words(3, 9)
EXAMPLES = [
    ComparedTexts("copied", (LONG,), "a"),
    ComparedTexts("free", (OTHER,), "b"),
    ComparedTexts("question", (SHORT, "Paris"), None),
    ComparedTexts("tiny", ("who is it",), None),
]


def test_thirteen_words_in_a_row_are_found_wherever_they_stand_and_twelve_are_not():
    parts = LONG.split()
    thirteen = document("d1", f"before {' '.join(parts[20:33]).upper()}, after")
    assert find_overlaps(EXAMPLES, [thirteen]).reasons == {"copied": ["n-gram"]}
    assert find_overlaps(EXAMPLES, [document("d1", " ".join(parts[20:32]))]).reasons == {}


def test_a_short_text_is_compared_whole_and_a_shorter_one_as_an_equal_text_alone():
    found = find_overlaps(
        EXAMPLES, [document("d1", f"x {SHORT} y"), document("d2", "Who is  IT"), document("d3", "in Paris")]
    )
    assert found.reasons == {"question": ["n-gram"], "tiny": ["equal text"]}
    assert found.num_short == 1
    assert "1 have fewer than 8 words: only documents equal to them count." in overlap_lines(found, ["tiny"])


def test_a_document_of_the_same_source_is_found_unless_it_is_not_retrieved():
    documents = [document("d1", words(9, 30), source="a"), document("d2", LONG, source="a")]
    assert find_overlaps(EXAMPLES, documents).reasons == {"copied": ["source", "equal text", "n-gram"]}
    own = find_overlaps(EXAMPLES, documents, excludes_own=True)
    assert own.reasons == {}
    assert "own source are not retrieved, and not compared: 1 of 4 have some." in overlap_lines(own, ["copied"])
    copy = document("d3", LONG, source="elsewhere")
    assert find_overlaps(EXAMPLES, [*documents, copy], True).reasons == {"copied": ["equal text", "n-gram"]}


def test_overlaps_are_those_of_a_naive_search():
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(2)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(5, 18))) for _ in range(60)]
    documents = [document(f"d{row}", " ".join(rng.choices(vocabulary, k=60))) for row in range(40)]
    found = find_overlaps([ComparedTexts(str(row), (text,), None) for row, text in enumerate(texts)], documents)
    for row, text in enumerate(texts):
        parts = text.split()
        n = min(13, len(parts))
        grams = {" ".join(parts[i : i + n]) for i in range(len(parts) - n + 1)} if n >= 8 else set()
        held = any(f" {gram} " in f" {doc.text} " for gram in grams for doc in documents)
        assert ("n-gram" in found.reasons.get(str(row), [])) == held
    assert 5 < len(found.reasons) < 55


def test_what_is_said_of_sources_is_what_is_known_of_them():
    some = find_overlaps(EXAMPLES[:3], [document("d1", "text")])
    assert "2 of 3 examples name a source, and 0 of 1 documents one that is not their id." in overlap_lines(
        some, ["free"]
    )
    none = find_overlaps(EXAMPLES[2:], [document("d1", "text")])
    assert "Sources are not compared: no example names one." in overlap_lines(none, ["tiny"])
    assert "0 by source" not in overlap_lines(none, ["tiny"]) and "0 by source" in overlap_lines(some, ["free"])


@pytest.fixture
def corpus(tmp_path):
    class Corpus:
        def __init__(self):
            documents = [
                document("d0", LONG, "s0"),
                *(document(f"d{i}", words(i + 50, 20), f"s{i % 3}") for i in range(1, 30)),
            ]
            write_documents(tmp_path / "documents", documents)
            self.corpus, self.corpus_sha256 = CorpusStore(tmp_path / "documents"), "abc"

    return Corpus()


def examples(num: int = 4) -> list[Example]:
    texts = [LONG, *(words(row + 200, 40) for row in range(1, num))]
    return [Example(f"w{i}", text[:100], text[100:], "all", f"s{i}") for i, text in enumerate(texts)]


def task_of(of: list[Example]) -> LanguageModelling:
    return LanguageModelling(StandInLM(), PromptTemplate("\n"), of)


def test_what_was_found_is_kept_and_measured_again_for_other_texts(corpus, tmp_path):
    config, path = EvaluationConfig(evaluation="lm", out="x"), tmp_path / "found/overlaps.jsonl"
    first = overlaps_with(config, corpus, task_of(examples()), path)
    assert first.reasons["w0"] == ["source", "equal text", "n-gram"] and first.num_documents == 30
    corpus.corpus = None  # is not read again
    assert overlaps_with(config, corpus, task_of(examples()), path) == first
    with pytest.raises(TypeError):
        overlaps_with(config, corpus, task_of(examples(3)), path)
    write_leakage(tmp_path / "leakage.json", first, ["w1", "w3"])
    assert '"share": 0.5' in (tmp_path / "leakage.json").read_text()


def test_every_figure_is_given_with_and_without_what_the_corpus_holds():
    task = task_of(examples())
    numbers = [{"bits": bits, "bytes": 10.0, "tokens": 5.0, "words": 2.0} for bits in (1.0, 10.0, 20.0, 30.0)]
    rows = [
        {"id": f"w{i}", "methods": {name: {"numbers": of, "detail": {}} for name in ("none", "replug")}}
        for i, of in enumerate(numbers)
    ]
    results = compare(task, rows, PaperConfig(), 100, 0, np.array([True, False, False, False]))
    assert results["none"]["bpb"]["value"] == pytest.approx(61 / 40)
    assert results["none"]["bpb/not in the corpus"]["value"] == pytest.approx(60 / 30)
    assert results["none"]["bpb/in the corpus"] == {"value": 0.1, "n": 1, "interval": [0.1, 0.1]}
    assert results["replug"]["bpb/not in the corpus - none"]["n"] == 3
    assert {"token_perplexity/not in the corpus", "word_perplexity/not in the corpus"} <= results["none"].keys()
    assert "| not in the corpus | 3 | 2.0000 | 2.0000 |" in markdown_table(results, "lm")
    assert "bpb/not in the corpus" not in compare(task, rows, PaperConfig(), 100, 0, np.ones(4, bool))["none"]


def test_documents_of_a_texts_own_source_are_not_found(corpus):
    def find(k: int) -> RetrievedDocuments:
        rows = np.tile(np.arange(30), (2, 1))[:, :k]
        return RetrievedDocuments(rows, -rows.astype(float))

    found = find_others(find, corpus, ["s0", "elsewhere"], k=12, at_least=12)
    assert found.doc_rows.tolist() == [[row for row in range(30) if row % 3][:12], list(range(12))]
    assert (found.similarities == -found.doc_rows).all()
    with pytest.raises(UserError, match="exclude_own_source: the corpus has fewer than 25 documents that are not of s"):
        find_others(find, corpus, ["s0", "s1"], k=25, at_least=25)


def test_no_method_finds_a_document_of_a_texts_own_source(corpus, tmp_path):
    config = EvaluationConfig(evaluation="lm", out="x", exclude_own_source=True)
    methods = parse_methods(["random@5", "bm25@5"], 5, {})
    found = find_all(config, corpus, [LONG, words(60, 20)], methods, tmp_path / "found", own=["s0", "s1"])
    for of in found.values():
        assert of.doc_rows.shape == (2, 20) and all(len(set(rows)) == 20 for rows in of.doc_rows.tolist())
        sources = [corpus.corpus.sources(rows) for rows in of.doc_rows]
        assert "s0" not in sources[0] and "s1" not in sources[1] and "s0" in sources[1]
    with_own = find_all(replace(config, exclude_own_source=False), corpus, [LONG], methods, tmp_path / "other")
    assert with_own["bm25"].doc_rows[0, 0] == 0


def test_a_text_without_a_source_is_refused_where_its_own_documents_are_left_out():
    require_sources(["a"], ["s"])
    with pytest.raises(UserError, match="exclude_own_source is set, but 1 of 2 texts name no source, b for one"):
        require_sources(["a", "b"], ["s", None])
