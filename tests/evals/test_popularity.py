"""Popularity: bins, correlation, the most frequent answer, and how often a corpus names an entity."""

import re

import numpy as np
import pytest

from replug.evals.answers import answer_tokens
from replug.evals.popqa import (
    document_frequencies,
    most_frequent,
    popularity_bin,
    popularity_correlation,
    relative_popularity,
)


@pytest.mark.parametrize(
    ("popularity", "name"),
    [
        (0, "0"),
        (1, "10^0-10^1"),
        (9, "10^0-10^1"),
        (10, "10^1-10^2"),
        (999, "10^2-10^3"),
        (1000, "10^3-10^4"),
        (10**15, "10^15-10^16"),
    ],
)
def test_a_bin_is_a_power_of_ten_whose_lower_end_belongs_to_it(popularity: int, name: str):
    assert popularity_bin(float(popularity)) == f"popularity {name}"


def test_the_correlation_is_pearsons_with_the_logarithm():
    rng = np.random.default_rng(0)
    popularity, right = rng.integers(1, 10**6, 200), rng.integers(0, 2, 200)
    expected = np.corrcoef(np.log10(popularity), right)[0, 1]
    assert popularity_correlation(popularity, right) == pytest.approx(expected)
    assert popularity_correlation(np.array([1, 10, 100]), np.array([0, 0.5, 1])) == pytest.approx(1)
    assert popularity_correlation(np.array([0, 10]), np.array([0, 1])) == pytest.approx(1), "0 counts as 1"


def test_there_is_no_correlation_with_what_does_not_vary():
    assert popularity_correlation(np.array([5, 5, 5]), np.array([0, 1, 1])) is None
    assert popularity_correlation(np.array([1, 2, 3]), np.array([1, 1, 1])) is None
    assert popularity_correlation(np.array([1]), np.array([1])) is None


def test_relative_popularity_is_in_its_relations_standard_deviations():
    popularity = np.array([0, 100, 1, 1000, 7.0])
    relative = relative_popularity(popularity, ["a", "a", "b", "b", "c"])
    assert relative.tolist() == pytest.approx([-1, 1, -1, 1, 0])


def test_the_most_frequent_answer_is_the_first_of_equals():
    assert most_frequent(["b", "a", "a", "b", "c"]) == "b"


def naive(entity: str, texts: list[str]) -> int:
    words = answer_tokens(entity)
    held = 0
    for text in texts:
        tokens = answer_tokens(text)
        held += any(tokens[place : place + len(words)] == words for place in range(len(tokens)))
    return held


def test_frequencies_equal_a_naive_count():
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(["a", "b", "A", "c", "é", "."], rng.integers(0, 9))) for _ in range(300)]
    entities = ["a", "a b", "A B", "a b a", "b", "é", "e", "c.", "a b c é", "d"]
    assert document_frequencies(entities, texts, len(texts)) == {name: naive(name, texts) for name in entities}


def test_a_name_is_found_by_its_words_whatever_their_case_and_form_and_not_inside_others():
    texts = ["José Smith-Jones!", "JOSE\u0301 smith - jones", "Josés Smith-Jones", "the jose Smith"]
    found = document_frequencies(["José Smith-Jones", "José", "Smith", "Smith", ""], texts, 4)
    assert found == {"José Smith-Jones": 2, "José": 2, "Smith": 4, "": 0}


def test_real_names_have_punctuation():
    texts = ["Charles A. Gillespie, Jr., was a diplomat", "Charles Gillespie"]
    found = document_frequencies(["Charles A. Gillespie, Jr.", "Charles Gillespie"], texts, 2)
    assert list(found.values()) == [1, 1]
    assert re.fullmatch(r"[a-z ,.]+", " ".join(answer_tokens("Charles A. Gillespie, Jr.")))
