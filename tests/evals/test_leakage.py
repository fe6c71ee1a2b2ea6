"""What the corpus holds of examples, against documents made for it."""

import random

from replug.data.records import Document
from replug.evals.leakage import find_overlaps, overlap_line
from replug.evals.loop import Item


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
    assert found == {"question": ["13 words in a row"], "tiny": ["equal text"]}
    assert overlap_line(found, 8) == "In the corpus: 2 of 8 examples (25.0%): 1 by equal text, 1 by 13 words in a row."


def test_a_document_of_the_same_source_is_found():
    documents = [document("d1", words(9, 30), source="a"), document("d2", LONG, source="a")]
    assert find_overlaps(EXAMPLES, TEXTS, documents) == {"copied": ["source", "equal text", "13 words in a row"]}


def test_words_that_half_of_the_sources_hold_are_no_leak_and_a_copy_beside_them_is():
    footer = " ".join(f"footer{number}" for number in range(20))
    documents = [document(f"d{i}", f"{words(i + 50, 20)} same {footer}", f"s{i}") for i in range(9)]
    documents += [document(f"e{i}", words(i + 80, 20), f"t{i}") for i in range(9)]
    alike = (f"{words(7, 20)} same {footer}",)  # ends in one more word that theirs have
    items = [Item("alike", "", "all", source="a"), Item("copied", "", "all", source="b")]
    texts = [alike, (f"{words(8, 20)} {footer}",)]
    assert find_overlaps(items, texts, documents) == {}
    copy = document("copy", f"{words(8, 20)} {footer}", "c")
    assert find_overlaps(items, texts, [*documents, copy]) == {"copied": ["equal text", "13 words in a row"]}
    chunks = [document(f"f{i}", f"{words(i + 150, 20)} {LONG}", "one") for i in range(9)]  # of one source of ten
    assert find_overlaps(EXAMPLES[1:], [(LONG,), *TEXTS[2:]], [*documents[9:], *chunks]) == {
        "free": ["13 words in a row"]
    }
    few = find_overlaps(items, texts, documents[:4])
    assert few == {"alike": ["13 words in a row"], "copied": ["13 words in a row"]}


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
        assert ("13 words in a row" in found.get(str(row), [])) == held
    assert 5 < len(found) < 55
