"""Sentences, passages, TF-IDF by hand."""

import math

import numpy as np
import pytest

from replug.web.evidence import split_passages, tfidf_cosines


def test_a_passage_is_six_sentences_and_the_last_is_the_rest() -> None:
    text = " ".join(f"Sentence number {number} is here." for number in range(14))
    passages = split_passages(text, 6)
    assert [passage.count(".") for passage in passages] == [6, 6, 2]
    assert " ".join(passages) == text


def test_abbreviations_end_no_sentence_and_lines_end_one_but_no_passage() -> None:
    text = "Dr. Smith of the U.S. Army met J. R. R. Tolkien.\n\nA heading\nIt cost  $3.5 million."
    assert split_passages(text, 1) == [
        "Dr. Smith of the U.S. Army met J. R. R. Tolkien.",
        "A heading",
        "It cost $3.5 million.",
    ]
    assert len(split_passages(text, 6)) == 1
    assert split_passages(" \n ", 6) == []


def test_cosines_equal_a_computation_by_hand() -> None:
    """Passages "red fox", "red hen", question "red fox cub": idf of red is 1, of fox 1 + log(3 / 2); cub is unknown."""
    fox = 1 + math.log(3 / 2)
    passage, question = np.array([1, fox, 0]), np.array([1, fox, 0])
    other = np.array([1, 0, fox])
    expected = [1.0, other @ question / np.linalg.norm(other) / np.linalg.norm(question)]
    assert tfidf_cosines("Red fox cub?", ["red fox", "Red hen."]) == pytest.approx(expected)
    assert passage @ question == pytest.approx(np.linalg.norm(question) ** 2)


def test_what_shares_no_word_has_cosine_0_also_where_there_are_no_words() -> None:
    assert tfidf_cosines("unknown", ["red fox", "hen"]).tolist() == [0, 0]
    assert tfidf_cosines("", ["red fox"]).tolist() == [0]
    assert tfidf_cosines("red", ["!", "?"]).tolist() == [0, 0]
