"""Pieces of a text join back to it, and hold as many tokens as asked."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from replug.data.tokenizing import cut_positions, split_text

Offsets = Callable[[str], list[tuple[int, int]]]
ODD_ONES = st.sampled_from(" \n\u00e9\u0301\u2028中🙂👩🏽\u200d")
ALL_PLANES = st.text(st.one_of(st.characters(max_codepoint=0x7F), ODD_ONES, st.characters(codec="utf-8")))
ASCII = st.text(st.characters(max_codepoint=0x7F))


def words(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\s*\S+|\s+", text)]


def byte_level(trim: bool) -> Tokenizer:
    """Bytes with a few merges; most characters beyond ASCII take several tokens, as in GPT-2's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat", "über die Brücke", "the bat, the rat"], trainer)
    return tokenizer


BYTE_LEVEL, TRIMMED = byte_level(trim=False), byte_level(trim=True)
TOKENIZERS = {
    "words": words,
    "byte-level": lambda text: BYTE_LEVEL.encode(text).offsets,
    "byte-level, white space trimmed": lambda text: TRIMMED.encode(text).offsets,
}


@pytest.mark.parametrize("offsets", TOKENIZERS.values(), ids=TOKENIZERS)
def test_pieces_join_back_to_the_text_whatever_it_holds(offsets: Offsets):
    @settings(deadline=None, database=None, max_examples=300)
    @given(ALL_PLANES, st.integers(1, 5))
    def check(text: str, tokens: int) -> None:
        pieces = split_text(text, offsets(text), tokens)
        assert "".join(pieces) == text
        assert all(pieces)

    check()


@pytest.mark.parametrize("name", ["words", "byte-level"])
def test_pieces_of_plain_text_hold_the_set_number_of_tokens_and_the_last_no_more(name: str):
    @settings(deadline=None, database=None, max_examples=300)
    @given(ASCII, st.integers(1, 5))
    def check(text: str, tokens: int) -> None:
        offsets = TOKENIZERS[name](text)
        ends = [end for _, end in offsets]
        counts, start = [], 0
        for piece in split_text(text, offsets, tokens):
            counts.append(sum(start < end <= start + len(piece) for end in ends))
            start += len(piece)
        assert sum(counts) == len(offsets)
        assert all(count == tokens for count in counts[:-1])
        assert all(0 < count <= tokens for count in counts[-1:])

    check()


def test_white_space_goes_with_the_word_after_it():
    assert split_text("one two  three\nfour five", words("one two  three\nfour five"), 2) == [
        "one two",
        "  three\nfour",
        " five",
    ]


def test_a_character_that_tokens_share_stays_whole_in_the_earlier_piece():
    # "a" is one token and the face four, so the third token ends inside it
    assert split_text("a🙂b", BYTE_LEVEL.encode("a🙂b").offsets, 3) == ["a🙂", "b"]
    assert cut_positions([(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)], 2) == [2]


def test_a_text_shorter_than_a_piece_stays_whole_and_an_empty_one_gives_none():
    assert split_text("one two", words("one two"), 5) == ["one two"]
    assert split_text("one two", words("one two"), 2) == ["one two"]
    assert split_text("", [], 3) == []
