"""BM25 against a number worked out by hand and against `bm25s`; its order, its memory."""

import gzip
import json
import math

import bm25s
import numpy as np
import pytest

from replug.config.errors import UserError
from replug.index_workers import bm25
from replug.index_workers.bm25 import search_bm25, without_words
from tests.support.shared_data import shared

TEXTS = [
    "red sky over the sea",
    "Blue sea and red sky, red evening",
    "a green tree",
    "the and of",  # nothing but stop words
    "sky sky sky sky",
    "evening: green sky; blue tree, blue tree!",
    "red sky over the sea",
]
Found = tuple[np.ndarray, np.ndarray]


def search(queries: list[str], k: int, texts: list[str] = TEXTS) -> Found:
    return search_bm25(lambda: iter(texts), queries, k)


def by_bm25s(texts: list[str], queries: list[str], k: int) -> Found:
    """An index of all words of all documents, in memory."""
    index = bm25s.BM25(method="lucene")
    index.index(bm25s.tokenize(texts, stopwords="english", show_progress=False), False, show_progress=False)
    words = [bm25s.tokenize(query, stopwords="english", return_ids=False, show_progress=False)[0] for query in queries]
    scores = np.stack([index.get_scores_from_ids(index.get_tokens_ids(of)) for of in words])
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(scores, rows, axis=1)


def test_words_are_cut_weighed_and_left_out_as_by_bm25s() -> None:
    queries = ["red sky", "The EVENING, the tree?", "blue blue sea", "sky unheardof"]
    ours = search(queries, len(TEXTS))
    for found, expected in zip(ours, by_bm25s(TEXTS, queries, len(TEXTS)), strict=True):
        np.testing.assert_array_equal(found, expected)
    # Lucene's formula: "sky" is in 5 of 7 documents with 27 words, and is the whole of the fifth.
    by_hand = math.log(1 + 2.5 / 5.5) * 4 / (4 + 1.5 * (0.25 + 0.75 * 4 / (27 / 7)))
    assert (ours[0][3][0], ours[1][3][0]) == (4, pytest.approx(by_hand))


def test_a_corpus_without_words_is_refused() -> None:
    for texts in ([], ["", "the", "a ?"]):
        with pytest.raises(UserError, match="no word that BM25 could search by"):
            search(["red"], 3, texts)


@pytest.fixture(scope="module")
def made_up() -> list[str]:
    """Words as often as in a language, some documents without any."""
    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(500)]
    chances = 1 / np.arange(1, 501)
    lengths = rng.integers(0, 40, 1000)
    return [" ".join(rng.choice(words, length, p=chances / chances.sum())) for length in lengths]


@pytest.mark.parametrize(("chunk", "k"), [(1, 20), (7, 5000), (1000, 1)])
def test_rows_and_scores_are_those_of_an_index_of_the_whole_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, made_up: list[str], chunk: int, k: int
) -> None:
    monkeypatch.setattr(bm25, "CHUNK_DOCUMENTS", chunk)
    texts = made_up[:300] if chunk == 1 else made_up
    queries = ["w3 w70 w71 w3", "w499", "nothing known", *made_up[5:9]]
    for ours, theirs in zip(search(queries, k, texts), by_bm25s(texts, queries, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("language", ["ar", "zh"])
def test_questions_find_their_passages_in_scripts_with_and_without_blanks(language: str) -> None:
    passages, questions = (
        [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        for file in (shared(f"xquad/{language}_{name}.jsonl.gz") for name in ("passages", "questions"))
    )
    rows, scores = search_bm25(
        lambda: (passage["text"] for passage in passages), [question["question"] for question in questions], 5
    )
    ids = [{passages[row]["id"] for row in found} for found in rows]
    found = [not own.isdisjoint(question["gold"]) for own, question in zip(ids, questions, strict=True)]
    assert np.mean(found) >= 0.9
    assert without_words(scores) is None


def test_a_search_that_finds_no_word_of_most_queries_is_told() -> None:
    _, scores = search(["莱茵河", "卢瓦尔河", "Loire"], 2, ["the Loire", "the Rhine"])
    assert "no word of 2 of 3 texts" in str(without_words(scores))
