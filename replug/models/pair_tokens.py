"""How a prefix and its continuation become token ids, the same for local weights and for a server.

The two are tokenized apart, so a continuation has the same tokens after every document, without which
its scores could not be compared. Local and served LM both send what this module makes: with the same
weights they give the same scores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replug.models.black_box_lm import UnscorableText

if TYPE_CHECKING:  # seconds to import, which a caller that brings a tokenizer has spent already
    from transformers import PreTrainedTokenizerBase

PairIds = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class TokenizedCall:
    """A call for scores as token ids: its pairs, and its opening, which is empty where it has none."""

    pairs: list[PairIds]
    opening: list[int]


@dataclass(frozen=True, slots=True)
class LMInput:
    """One input of a pass: a prefix with its continuation, or a prefix with alternatives of one token each.

    Such alternatives, as the letters of a multiple-choice question, are predicted from the prefix's last position, so
    the LM reads their prefix once. `rows` are the call's, one for each continuation.
    """

    prefix: list[int]
    continuations: list[list[int]]
    rows: list[int]

    @property
    def ids(self) -> list[int]:
        """Return the tokens to read. Alternatives are predicted, not read."""
        return self.prefix + self.continuations[0] if len(self.rows) == 1 else self.prefix

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + (len(self.continuations[0]) if len(self.rows) == 1 else 0)

    @property
    def pairs(self) -> list[PairIds]:
        return [(self.prefix, continuation) for continuation in self.continuations]


def inputs_of(pairs: Sequence[PairIds]) -> list[LMInput]:
    """Return the inputs of a call, every row once, in the order of their first rows. They follow from the texts."""
    together: dict[tuple, list[int]] = {}
    for row, (prefix, continuation) in enumerate(pairs):
        key = (tuple(prefix),) if len(continuation) == 1 else (tuple(prefix), row)
        together.setdefault(key, []).append(row)
    return [LMInput(pairs[rows[0]][0], [pairs[row][1] for row in rows], rows) for rows in together.values()]


def pair_token_ids(tokenizer: "PreTrainedTokenizerBase", prefix: str, continuation: str) -> PairIds:
    """Return ids of the prefix, never empty and never closed by an end token, and ids of the continuation."""
    [pair] = pairs_token_ids(tokenizer, [prefix], [continuation])
    return pair


def pairs_token_ids(
    tokenizer: "PreTrainedTokenizerBase", prefixes: Sequence[str], continuations: Sequence[str]
) -> list[PairIds]:
    """Return `pair_token_ids` of each pair, in two calls of the tokenizer: a call costs more than its text.

    What stands in several pairs is tokenized once, and its ids are one list: nobody may change it.
    """
    before = _ids_by_text(tokenizer, prefixes, special=True)
    after = _ids_by_text(tokenizer, continuations, special=False)
    opened = {prefix: _opened(tokenizer, ids) for prefix, ids in before.items()}
    return [(opened[prefix], after[continuation]) for prefix, continuation in zip(prefixes, continuations, strict=True)]


def _ids_by_text(tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str], special: bool) -> dict[str, list[int]]:
    """Return ids of each text once; an empty one has none, not even special tokens."""
    ids: dict[str, list[int]] = {text: [] for text in texts}
    if some := [text for text in ids if text]:
        rows = tokenizer(some, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)
        ids.update(zip(some, rows["input_ids"], strict=True))
    return ids


def _opened(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[int]:
    """Return a prefix's ids without an end token, and with one that the first token is predicted from."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if ids and ids[-1] == end:  # some tokenizers close every text
        ids = ids[:-1]
    return ids or [start if start is not None else end]


def check_lengths(pairs: Sequence[PairIds], max_tokens: int | None) -> None:
    """Raise UnscorableText for a continuation without tokens or an input beyond `max_tokens`."""
    for row, (before, after) in enumerate(pairs):
        if not after:
            raise UnscorableText(f"continuation {row} has no tokens: the LM's tokenizer drops all of it")
        if max_tokens is not None and len(before) + len(after) > max_tokens:
            raise UnscorableText(
                f"input {row} has {len(before)} + {len(after)} tokens (prefix + continuation), "
                f"but the LM holds {max_tokens}: shorten the documents or take an LM with a longer context"
            )
