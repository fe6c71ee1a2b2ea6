"""Whole texts as windows in which every token is scored once.

A window's context is the piece of text before its continuation. The first piece of a text has none: nothing can be
retrieved for it, so it is scored without documents under every method, and counted.
"""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from replug.data.chunks import split_text
from replug.data.records import Window
from replug.data.sources.records import SourceText
from replug.data.tokenizing import token_offsets


def windows_of(texts: Iterable[SourceText], tokenizer: Tokenizer, window: int) -> Iterator[Window]:
    """Windows of `window` tokens, text after text; the last of a text may be shorter."""
    for text in texts:
        [offsets] = token_offsets(tokenizer, [text.text])
        pieces = split_text(text.text, offsets, window)
        assert "".join(pieces) == text.text, f"the windows of {text.id} do not join to it"
        for number, piece in enumerate(pieces):
            context = pieces[number - 1] if number else ""
            yield Window(f"{text.id}#{number}", context, piece, text.domain, text.id)
