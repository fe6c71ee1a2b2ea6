"""Wikitext in usual writing, and the words of its original."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.evals.windows import detokenized_wikitext, unit_starts

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


@pytest.mark.parametrize(
    "text", ["", "\n", " \n \n", "a", "@-@ b", "a @-@", "a @-@ @-@ b", "x @-@ y @,@ z", "\u2028 a \u2029"]
)
def test_no_word_is_lost_or_made(text):
    assert len(detokenized_wikitext(text)[1]) == len(unit_starts(text))


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("as'\"() @-,.=:°\n\t\u00a0"), max_size=40))
def test_words_of_any_text_begin_in_order_at_a_visible_character_or_a_line_end(text):
    written, starts = detokenized_wikitext(text)
    assert len(starts) == len(unit_starts(text)) and starts == sorted(set(starts))
    assert all(written[start] == "\n" or not written[start].isspace() for start in starts)
    assert written.count("\n") == text.count("\n")


def test_words_stand_between_white_space_and_each_line_has_an_end():
    assert unit_starts("a  bc\nd\n\n") == [0, 3, 5, 6, 7, 8]
