"""BM25 against the formula worked out word by word and against `bm25s`; its order, its memory."""

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
WORDS = [
    ["red", "sky", "over", "sea"],
    ["blue", "sea", "red", "sky", "red", "evening"],
    ["green", "tree"],
    [],
    ["sky", "sky", "sky", "sky"],
    ["evening", "green", "sky", "blue", "tree", "blue", "tree"],
    ["red", "sky", "over", "sea"],
]


def brute_force(query: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25 of every document, without its constant factor of k1 + 1."""
    mean_length = sum(map(len, WORDS)) / len(WORDS)
    scores = []
    for words in WORDS:
        score = 0.0
        for word in query:
            containing = sum(word in other for other in WORDS)
            idf = math.log(1 + (len(WORDS) - containing + 0.5) / (containing + 0.5))
            frequency = words.count(word)
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(words) / mean_length))
        scores.append(score)
    return scores


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


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("red sky", ["red", "sky"]),
        ("The EVENING, the tree?", ["evening", "tree"]),
        ("blue blue sea", ["blue", "blue", "sea"]),  # a word that is repeated counts each time
        ("sky unheardof", ["sky"]),
    ],
)
def test_scores_equal_the_formula(query: str, words: list[str]) -> None:
    rows, scores = search([query], len(TEXTS))
    expected = brute_force(words)
    assert sorted(rows[0].tolist()) == list(range(len(TEXTS)))
    np.testing.assert_allclose(scores[0], [expected[row] for row in rows[0]], rtol=1e-5, atol=1e-7)
    assert (np.diff(scores[0]) <= 0).all()


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
    lengths = rng.integers(0, 40, 3000)
    return [" ".join(rng.choice(words, length, p=chances / chances.sum())) for length in lengths]


@pytest.mark.parametrize(("chunk", "k"), [(1, 20), (7, 5000), (100, 1), (3000, 20)])
def test_rows_and_scores_are_those_of_an_index_of_the_whole_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, made_up: list[str], chunk: int, k: int
) -> None:
    monkeypatch.setattr(bm25, "CHUNK_DOCUMENTS", chunk)
    texts = made_up[:300] if chunk == 1 else made_up
    queries = ["w3 w70 w71 w3", "w499", "nothing known", *made_up[5:9]]
    for ours, theirs in zip(search(queries, k, texts), by_bm25s(texts, queries, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("language", ["de", "ar", "th", "zh"])
def test_questions_find_their_passages_in_scripts_with_and_without_blanks(language: str) -> None:
    passages, questions = (
        [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        for file in (shared(f"xquad/{language}_{name}.jsonl.gz") for name in ("passages", "questions"))
    )
    rows, scores = search_bm25(
        lambda: (passage["text"] for passage in passages), [question["question"] for question in questions], 5
    )
    right = [
        passages[row]["id"] in question["gold"]
        for found, question in zip(rows, questions, strict=True)
        for row in found
    ]
    assert np.array(right).reshape(rows.shape).any(axis=1).mean() >= 0.9
    assert without_words(scores) is None


def test_a_search_that_finds_no_word_of_most_queries_is_told() -> None:
    _, scores = search(["莱茵河", "卢瓦尔河", "Loire"], 2, ["the Loire", "the Rhine"])
    assert "no word of 2 of 3 texts" in str(without_words(scores))
