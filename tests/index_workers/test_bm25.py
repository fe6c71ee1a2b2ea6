"""BM25 against the formula worked out word by word, its order."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from replug.configs.errors import UserError
from replug.index_workers.bm25 import Bm25Index

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
WIKIPEDIA = Path(__file__).parents[3] / "shared" / "data" / "mini_wikipedia.jsonl.gz"


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


@pytest.fixture(scope="module")
def index() -> Bm25Index:
    return Bm25Index(text for text in TEXTS)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("red sky", ["red", "sky"]),
        ("The EVENING, the tree?", ["evening", "tree"]),
        ("blue blue sea", ["blue", "blue", "sea"]),  # a word that is repeated counts each time
        ("sky unheardof", ["sky"]),
    ],
)
def test_scores_equal_the_formula(index: Bm25Index, query: str, words: list[str]) -> None:
    rows, scores = index.search([query], len(TEXTS))
    expected = brute_force(words)
    assert sorted(rows[0].tolist()) == list(range(len(TEXTS)))
    np.testing.assert_allclose(scores[0], [expected[row] for row in rows[0]], rtol=1e-5, atol=1e-7)
    assert (np.diff(scores[0]) <= 0).all()


def test_equal_documents_come_in_the_order_of_their_rows(index: Bm25Index) -> None:
    for k in range(1, len(TEXTS) + 1):
        rows, scores = index.search(["over red"], k)
        whole, _ = index.search(["over red"], len(TEXTS))
        assert rows[0].tolist() == whole[0, :k].tolist()
    assert whole[0].tolist() == [0, 6, 1, 2, 3, 4, 5]
    assert scores[0, 0] == scores[0, 1] > scores[0, 2] > scores[0, 3] == 0


def test_a_query_without_a_known_word_gets_the_first_rows_with_score_zero(index: Bm25Index) -> None:
    for query in ("unheardof", "the", "", "?!", "日本"):
        rows, scores = index.search([query], 3)
        assert rows.tolist() == [[0, 1, 2]]
        assert scores.tolist() == [[0, 0, 0]]


def test_the_queries_of_a_call_do_not_touch_each_other(index: Bm25Index) -> None:
    queries = ["red sky", "unheardof", "tree", "evening sea"]
    rows, scores = index.search(queries, 4)
    assert rows.shape == scores.shape == (4, 4) and rows.dtype == np.int64 and scores.dtype == np.float32
    for place, query in enumerate(queries):
        alone = index.search([query], 4)
        np.testing.assert_array_equal(rows[place], alone[0][0])
        np.testing.assert_array_equal(scores[place], alone[1][0])
    assert index.search([], 4)[0].shape == (0, 4)


def test_where_there_are_fewer_documents_there_are_fewer_columns(index: Bm25Index) -> None:
    assert len(index) == len(TEXTS)
    assert index.search(["red"], 100)[0].shape == (1, len(TEXTS))


def test_a_corpus_without_words_is_refused() -> None:
    for texts in ([], ["", "the", "a ?"]):
        with pytest.raises(UserError, match="no word that BM25 could search by"):
            Bm25Index(texts)


@pytest.mark.skipif(not WIKIPEDIA.exists(), reason=f"{WIKIPEDIA} is not here; it is no part of the repository")
def test_gold_is_found_among_ten_thousand_passages() -> None:
    with gzip.open(WIKIPEDIA, "rt", encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    rows_of = {passage["id"]: row for row, passage in enumerate(passages)}
    with gzip.open(WIKIPEDIA.with_name("nq_open_gold.jsonl.gz"), "rt", encoding="utf-8") as file:
        questions = [json.loads(line) for line in file][:300]
    index = Bm25Index(f"{passage['title']}\n{passage['text']}" for passage in passages)
    rows, _ = index.search([question["question"] for question in questions], 20)
    gold = [{rows_of[doc] for doc in question["gold"]} for question in questions]
    hits = [bool(wanted & set(found)) for wanted, found in zip(gold, rows.tolist(), strict=True)]
    assert np.mean(hits) > 0.8
