"""Whole texts as windows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.data.sources.records import SourceText
from replug.data.tokenizing import load_plain, word_tokenizer
from replug.evals.windows import windows_of
from replug.models.local.stand_in_lm import WORD

WORDS = load_plain(word_tokenizer(WORD.pattern))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=3), st.integers(1, 7))
def test_every_character_is_scored_once_and_stands_behind_the_piece_before_it(texts, window):
    sources = [SourceText(str(number), text, "all") for number, text in enumerate(texts)]
    windows = list(windows_of(sources, WORDS, window))
    for source in sources:
        of = [w for w in windows if w.source == source.id]
        assert "".join(w.continuation for w in of) == source.text
        assert of[0].context == ""
        assert [w.context for w in of[1:]] == [w.continuation for w in of[:-1]]


def test_a_window_holds_so_many_tokens_and_the_last_what_is_left():
    [a, b] = windows_of([SourceText("t", "one two three four five", "news")], WORDS, 3)
    assert (a.continuation, b.continuation) == ("one two three", " four five")
    assert (a.id, b.id, a.domain) == ("t#0", "t#1", "news")


@pytest.mark.parametrize("window", [1, 2, 50])
def test_the_words_of_all_windows_are_those_of_the_text(window):
    text = "a  b\nc d\n\ne"
    windows = list(windows_of([SourceText("t", text, "all")], WORDS, window))
    assert sum(len(w.continuation.split()) for w in windows) == len(text.split())
