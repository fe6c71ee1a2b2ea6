"""Words of a text, and the examples that are measured."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.config.evaluation_schema import TextsConfig
from replug.data.sources.records import SourceText
from replug.data.tokenizing import load_plain, word_tokenizer
from replug.evals.spans import (
    ROOM,
    ScoredSpan,
    TokenBorders,
    detokenized_wikitext,
    draw_evenly,
    long_context,
    spans_of,
    unit_starts,
)
from replug.models.local.stand_in_lm import WORD

LINES = (
    ' = Robert Boulter = \n \n He wasn \'t 1 @,@ 200 @-@ strong ( so he said ) , " quoted " ; at 5 ° C .\n'
    " The dogs ' tails end @.@ 5 !\n It 's \n"
)
WRITTEN = (
    "= Robert Boulter =\n\nHe wasn 't 1,200-strong (so he said), \"quoted\"; at 5°C .\nThe dogs' tails end.5 !\nIt's\n"
)


def test_wikitext_is_read_in_usual_writing():
    assert detokenized_wikitext(LINES)[0] == WRITTEN


def test_the_words_and_line_ends_are_those_of_the_original():
    text, starts = detokenized_wikitext(LINES)
    assert len(starts) == len(LINES.split()) + LINES.count("\n") == len(unit_starts(LINES))
    begun = [text[start : start + 4] for start in starts]
    assert begun[:7] == ["= Ro", "Robe", "Boul", "=\n\nH", "\n\nHe", "\nHe ", "He w"]
    at = LINES.split().index("@,@")
    assert [text[start] for start in starts[at + 2 : at + 5]] == [",", "2", "-"], "two line ends are before"


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("as'\"() @-,.=:°\n\t\u00a0"), max_size=40))
def test_words_of_any_text_begin_in_order_at_a_visible_character_or_a_line_end(text):
    written, starts = detokenized_wikitext(text)
    assert len(starts) == len(unit_starts(text)) and starts == sorted(set(starts))
    assert all(written[start] == "\n" or not written[start].isspace() for start in starts)
    assert written.count("\n") == text.count("\n")


WORDS = load_plain(word_tokenizer(WORD.pattern))
PAIRS = load_plain(word_tokenizer(r"\s?\S{1,2}|\s"))  # cuts words after two characters


def spans(text: str, tokenizer, keys: TextsConfig) -> list[ScoredSpan]:
    return list(spans_of(SourceText("t", text, "all"), unit_starts(text), tokenizer, keys))


def rule(scored: int, context: int | None = None, query: int | None = None) -> TextsConfig:
    return TextsConfig(scored_tokens=scored, context_tokens=context or scored, query_tokens=query or scored)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=200), st.integers(1, 7))
def test_every_character_is_scored_once_and_stands_behind_the_piece_before_it(text, tokens):
    found = spans(text, WORDS, rule(tokens))
    assert "".join(span.continuation for span in found) == text
    assert found[0].context == found[0].query == ""
    assert [span.context for span in found[1:]] == [span.continuation for span in found[:-1]]


def test_a_span_holds_so_many_tokens_and_the_last_what_is_left():
    [a, b] = spans_of(SourceText("t", "one two three four five", "news"), [], WORDS, rule(3))
    assert (a.continuation, b.continuation) == ("one two three", " four five")
    assert (a.id, b.id, a.domain, a.source) == ("t#0-13", "t#13-23", "news", "t")


def test_what_is_read_and_what_is_searched_for_have_lengths_of_their_own():
    found = spans("a b c d e f g", WORDS, rule(scored=1, context=3, query=2))
    assert [(span.continuation, span.context, span.query) for span in found][::3] == [
        ("a", "", ""),
        (" d", "a b c", " b c"),
        (" g", " d e f", " e f"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("ab é\n\t"), min_size=1, max_size=80), st.integers(1, 9))
def test_the_words_and_line_ends_of_all_spans_are_those_of_the_text_whatever_the_tokens(text, tokens):
    """A word that a border cuts counts once."""
    for tokenizer in (WORDS, PAIRS):
        found = spans(text, tokenizer, rule(tokens))
        assert sum(span.num_words for span in found) == len(text.split()) + text.count("\n")


def test_a_long_context_is_the_end_of_the_text_before_that_the_lm_holds_with_the_span():
    text = " ".join(f"w{number}" for number in range(100))
    borders = TokenBorders.of(WORDS, text)
    *_, last = spans(text, WORDS, rule(10))
    assert long_context(text, borders, last, None) == text[: last.start]
    some = long_context(text, borders, last, ROOM + 10 + 20)
    assert text[: last.start].endswith(some) and some.split() == [f"w{number}" for number in range(70, 90)]
    assert long_context(text, borders, last, 5) == "", "the span alone fills the LM"


def test_spans_are_drawn_from_equal_parts_of_all_so_every_text_gives_some():
    rows = draw_evenly(64 * 39, 200, seed=0)
    assert len(rows) == len(set(rows)) == 200 and rows == sorted(rows)
    of_texts = np.bincount(np.array(rows) // 39, minlength=64)
    assert of_texts.min() >= 2 and of_texts.max() <= 5
    assert draw_evenly(64 * 39, 200, seed=0) == rows != draw_evenly(64 * 39, 200, seed=1)
    assert draw_evenly(3, None, 0) == draw_evenly(3, 5, 0) == [0, 1, 2]
