"""What the corpus holds of examples, against documents made for it."""

import random
from types import SimpleNamespace

import pytest

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.records import Document, Example
from replug.data.shards import write_documents
from replug.data.store import CorpusStore
from replug.evals.language_modelling import LanguageModelling
from replug.evals.leakage import find_overlaps, overlap_line, overlaps_with
from replug.evals.loop import Item
from replug.models.local.stand_in_lm import StandInLM
from tests.support.known_lm import opened


def words(seed: int, num: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10**9)}" for _ in range(num))


def document(name: str, text: str, source: str | None = None) -> Document:
    return Document(name, text, "all", source or name)


LONG, OTHER, SHORT = words(1, 40), words(2, 40), words(3, 9)
EXAMPLES = [
    Item("copied", "", "all", source="a"),
    Item("free", "", "all", source="b"),
    Item("question", "", "all"),
    Item("tiny", "", "all"),
]
TEXTS = [(LONG,), (OTHER,), (SHORT, "Paris"), ("who is it",)]


def test_a_short_text_is_compared_whole_and_a_shorter_one_as_an_equal_text_alone():
    documents = [document("d1", f"x {SHORT} y"), document("d2", "Who is  IT"), document("d3", "in Paris")]
    found = find_overlaps(EXAMPLES, TEXTS, documents)
    assert found.reasons == {"question": ["n-gram"], "tiny": ["equal text"]}
    assert found.num_short == 1
    assert "1 have fewer than 8 words: only documents equal to them count." in overlap_line(found, ["tiny"])


def test_a_document_of_the_same_source_is_found_unless_it_is_not_retrieved():
    documents = [document("d1", words(9, 30), source="a"), document("d2", LONG, source="a")]
    assert find_overlaps(EXAMPLES, TEXTS, documents).reasons == {"copied": ["source", "equal text", "n-gram"]}
    own = find_overlaps(EXAMPLES, TEXTS, documents, excludes_own=True)
    assert own.reasons == {}
    assert "own source are not retrieved, and not compared." in overlap_line(own, ["copied"])
    copy = document("d3", LONG, source="elsewhere")
    assert find_overlaps(EXAMPLES, TEXTS, [*documents, copy], True).reasons == {"copied": ["equal text", "n-gram"]}


def test_words_that_half_of_the_sources_hold_are_no_leak_and_a_copy_beside_them_is():
    footer = " ".join(f"footer{number}" for number in range(20))
    documents = [document(f"d{i}", f"{words(i + 50, 20)} same {footer}", f"s{i}") for i in range(9)]
    documents += [document(f"e{i}", words(i + 80, 20), f"t{i}") for i in range(9)]
    alike = (f"{words(7, 20)} same {footer}",)  # ends in one more word that theirs have
    items = [Item("alike", "", "all", source="a"), Item("copied", "", "all", source="b")]
    texts = [alike, (f"{words(8, 20)} {footer}",)]
    assert find_overlaps(items, texts, documents).reasons == {}
    copy = document("copy", f"{words(8, 20)} {footer}", "c")
    assert find_overlaps(items, texts, [*documents, copy]).reasons == {"copied": ["equal text", "n-gram"]}
    chunks = [document(f"f{i}", f"{words(i + 150, 20)} {LONG}", "one") for i in range(9)]  # of one source of ten
    assert find_overlaps(EXAMPLES[1:], [(LONG,), *TEXTS[2:]], [*documents[9:], *chunks]).reasons == {"free": ["n-gram"]}
    few = find_overlaps(items, texts, documents[:4])
    assert few.reasons == {"alike": ["n-gram"], "copied": ["n-gram"]}


def test_overlaps_are_those_of_a_naive_search():
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(2)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(5, 18))) for _ in range(60)]
    documents = [document(f"d{row}", " ".join(rng.choices(vocabulary, k=60))) for row in range(40)]
    items = [Item(str(row), "", "all") for row in range(len(texts))]
    found = find_overlaps(items, [(text,) for text in texts], documents)
    for row, text in enumerate(texts):
        parts = text.split()
        n = min(13, len(parts))
        grams = {" ".join(parts[i : i + n]) for i in range(len(parts) - n + 1)} if n >= 8 else set()
        held = any(f" {gram} " in f" {doc.text} " for gram in grams for doc in documents)
        assert ("n-gram" in found.reasons.get(str(row), [])) == held
    assert 5 < len(found.reasons) < 55


@pytest.fixture
def corpus(tmp_path):
    documents = [document(f"d{i}", words(i + 50, 20) if i else LONG, f"s{i % 3}") for i in range(30)]
    write_documents(tmp_path / "documents", documents)
    return SimpleNamespace(corpus=CorpusStore(tmp_path / "documents"), corpus_sha256="abc")


def examples(num: int = 4) -> list[Example]:
    texts = [LONG, *(words(row + 200, 40) for row in range(1, num))]
    return [Example(f"w{i}", text[:100], text[100:], "all", f"s{i}") for i, text in enumerate(texts)]


def task_of(of: list[Example]) -> LanguageModelling:
    return opened(LanguageModelling(of), StandInLM())


def test_what_was_found_is_kept_and_measured_again_for_other_texts(corpus, tmp_path):
    config, path = EvaluationConfig(evaluation="lm", out="x"), tmp_path / "leakage.json"
    first = overlaps_with(config, corpus, task_of(examples()), path)
    assert first.reasons["w0"] == ["source", "equal text", "n-gram"]
    corpus.corpus = None  # is not read again
    assert overlaps_with(config, corpus, task_of(examples()), path) == first
    with pytest.raises(TypeError):  # of other texts it would be read
        overlaps_with(config, corpus, task_of(examples(3)), path)
