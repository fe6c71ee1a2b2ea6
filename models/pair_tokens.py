"""How a prefix and its continuation become token ids, the same for local weights and for a server.

The two are tokenized apart, so a continuation has the same tokens after every document, without which
its scores could not be compared. Local and served LM both send what this module makes: with the same
weights they give the same scores.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replug.models.black_box_lm import UnscorableText

if TYPE_CHECKING:  # seconds to import, which a caller that brings a tokenizer has spent already
    from transformers import PreTrainedTokenizerBase

PairIds = tuple[list[int], list[int]]


def pair_token_ids(tokenizer: "PreTrainedTokenizerBase", prefix: str, continuation: str) -> PairIds:
    """Ids of the prefix, never empty and never closed by an end token, and ids of the continuation."""
    before = tokenizer(prefix)["input_ids"] if prefix else []
    end = tokenizer.eos_token_id
    if before and before[-1] == end:  # some tokenizers close every text
        before = before[:-1]
    if not before:  # the first token needs something to be predicted from
        start = tokenizer.bos_token_id
        before = [start if start is not None else end]
    return before, tokenizer(continuation, add_special_tokens=False)["input_ids"]


def check_lengths(pairs: Sequence[PairIds], max_tokens: int | None) -> None:
    """Raises UnscorableText for a continuation without tokens and for inputs beyond `max_tokens`."""
    for row, (before, after) in enumerate(pairs):
        if not after:
            raise UnscorableText(f"continuation {row} has no tokens: the LM's tokenizer drops all of it")
        if max_tokens is not None and len(before) + len(after) > max_tokens:
            raise UnscorableText(
                f"input {row} has {len(before)} + {len(after)} tokens (prefix + continuation), "
                f"but the LM holds {max_tokens}: shorten the documents or take an LM with a longer context"
            )
