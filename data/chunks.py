"""Cutting texts at token borders so that the pieces join back to the original, byte for byte.

The cut falls after a token's last character: white space before a word belongs to that word, as
byte-level tokenizers have it. Pure: takes the tokenizer's character offsets.
"""

import itertools
from typing import Protocol


class Offsets(Protocol):
    """(start, end) characters of each token."""

    def __len__(self) -> int: ...

    def __getitem__(self, token: int, /) -> tuple[int, int]: ...


def cut_positions(offsets: Offsets, tokens_per_piece: int) -> list[int]:
    """Character positions between pieces of `tokens_per_piece` tokens, given each token's (start, end).

    A character that several tokens share stays whole, in the earlier piece.
    """
    ends = [offsets[i - 1][1] for i in range(tokens_per_piece, len(offsets), tokens_per_piece)]
    return sorted(set(ends))


def split_text(text: str, offsets: Offsets, tokens_per_piece: int) -> list[str]:
    """Pieces of a text; their concatenation is the text."""
    cuts = [0, *(cut for cut in cut_positions(offsets, tokens_per_piece) if 0 < cut < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts) if end > start]
