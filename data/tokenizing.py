"""Tokenizers as JSON of the `tokenizers` library, which every worker loads without transformers.

A text is tokenized in segments, so memory does not grow with its length. If only its first tokens are read, only its
beginning is tokenized.

Pieces of a text join back to the original, byte for byte. A cut falls after a token's last character: white space
before a word belongs to that word, as in byte-level tokenizers.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from replug.data.files import json_sha256


def split_text(text: str, token_ends: Sequence[int], tokens_per_piece: int) -> list[str]:
    """Cut a text into pieces of `tokens_per_piece` tokens at their `token_ends`; the pieces join back to the text.

    A character that several tokens share stays whole, in the earlier piece.
    """
    ends = {token_ends[i - 1] for i in range(tokens_per_piece, len(token_ends), tokens_per_piece)}
    cuts = [0, *sorted(end for end in ends if 0 < end < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts) if end > start]


SEGMENT_CHARACTERS = 1 << 17  # a text is tokenized in parts of at most this length, cut before white space


@dataclass(frozen=True, slots=True)
class TokenIds:
    """How the retriever reads a document: `prompt` before it, special tokens included, cut at `max_tokens`."""

    tokenizer: str  # JSON
    max_tokens: int
    vocab_size: int
    prompt: str = ""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size < 2**16 else np.uint32)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the limit and the prompt, which with the text determine the ids."""
        return _fingerprint(self)


@lru_cache(4)  # a tokenizer's JSON is megabytes
def _fingerprint(rule: TokenIds) -> str:
    rules = json.loads(rule.tokenizer)
    for of_the_last_call in ("truncation", "padding"):
        rules.pop(of_the_last_call, None)
    return json_sha256([rules, rule.max_tokens, *([rule.prompt] if rule.prompt else [])])[:16]


def load_plain(tokenizer: str) -> Tokenizer:
    """Return the tokenizer of a JSON text, without truncation or padding. Control tokens count as plain text."""
    loaded = Tokenizer.from_str(tokenizer)
    loaded.encode_special_tokens = True
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def inside_rules(tokenizer: str) -> str:
    """Return the JSON of a tokenizer that puts no blank before a text, as inside another text."""
    rules = json.loads(tokenizer)
    changed = rules | {part: _without_blank(rules.get(part)) for part in ("normalizer", "pre_tokenizer")}
    return tokenizer if changed == rules else json.dumps(changed, ensure_ascii=False)


def _without_blank(part: Any) -> Any:
    match part:
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            return part | {name: [kept for inner in part[name] if (kept := _without_blank(inner)) is not None]}
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
    return part


def word_tokenizer(pattern: str) -> str:
    """Return the JSON of a tokenizer with tokens that match a pattern, for word-level stand-ins."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return tokenizer.to_str()


def token_ends(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the characters at which each text's tokens end, without special tokens."""
    borders = [_segment_borders(text) for text in texts]
    parts = [
        text[start:end]
        for text, cuts in zip(texts, borders, strict=True)
        for start, end in itertools.pairwise([*cuts, len(text)])
    ]
    encodings = iter(tokenizer.encode_batch(parts, add_special_tokens=False))
    return [[start + end for start in cuts for _, end in next(encodings).offsets] for cuts in borders]


def num_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8, at once where it is ASCII."""
    return len(text) if text.isascii() else len(text.encode())


def pieces_within(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> list[list[str]]:
    """Cut each text into pieces of at most `limit` tokens, as even as can be; nearly always one piece.

    A token is at least one byte, so only texts with more than `limit` bytes are tokenized.
    """
    long = [row for row, text in enumerate(texts) if num_bytes(text) > limit]
    encodings = tokenizer.encode_batch_fast([texts[row] for row in long], add_special_tokens=False)
    over = {row for row, encoding in zip(long, encodings, strict=True) if len(encoding) > limit}
    return [_cut_evenly(tokenizer, text, limit) if row in over else [text] for row, text in enumerate(texts)]


def _cut_evenly(tokenizer: Tokenizer, text: str, limit: int) -> list[str]:
    """Cut a text evenly. Its pieces may have other tokens than before, so they are counted again."""
    ends = token_ends(tokenizer, [text])[0]
    parts = split_text(text, ends, -(-len(ends) // max(2, -(-len(ends) // limit))))
    if len(parts) == 1:
        return parts  # one character of many tokens
    return [piece for pieces in pieces_within(tokenizer, parts, limit) for piece in pieces]


@lru_cache(8)
def reader(rule: TokenIds) -> Tokenizer:
    """Return the tokenizer of a rule, which cuts texts at its tokens: shared and loaded once, so leave it as it is."""
    loaded = load_plain(rule.tokenizer)
    loaded.encode_special_tokens = False
    loaded.enable_truncation(rule.max_tokens)
    return loaded


def ids_of_texts(rule: TokenIds, texts: Sequence[str]) -> list[np.ndarray]:
    """Return token ids of each text as the retriever reads it."""
    tokenizer = reader(rule)

    def tokenize(parts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(parts)]

    rows = cut_ids(tokenize, [rule.prompt + text for text in texts], rule.max_tokens)
    return [np.array(row, rule.dtype) for row in rows]


FIRST_CHARACTERS, GROWTH = 8, 4  # characters for each token at first, and the factor of each further attempt


def cut_ids(tokenize: Callable[[list[str]], list[list[int]]], texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Return the ids of each text, cut at `max_tokens`, without tokenizing the rest of a long text.

    `tokenize` cuts its texts at `max_tokens` ids. A long text is tokenized in longer and longer parts, until two in a
    row give the same `max_tokens` ids: the rest of the text changes nothing. A text with many characters in a token,
    such as a page of blanks, needs longer parts.
    """
    rows: list[list[int]] = [[]] * len(texts)
    length, left = FIRST_CHARACTERS * max_tokens, list(range(len(texts)))
    while left:
        parts = [text if len(text) <= GROWTH * length else text[:length] for text in (texts[row] for row in left)]
        longer = []
        for row, part, ids in zip(left, parts, tokenize(parts), strict=True):
            if len(part) < len(texts[row]) and (len(ids) < max_tokens or ids != rows[row]):
                longer.append(row)
            rows[row] = ids
        length, left = GROWTH * length + 1, longer  # + 1: digits may be grouped in threes from the end
    return rows


def _segment_borders(text: str) -> list[int]:
    """Return the starts of a text's segments."""
    borders = [0]
    while len(text) - borders[-1] > SEGMENT_CHARACTERS:
        limit = borders[-1] + SEGMENT_CHARACTERS
        space = max(text.rfind(" ", borders[-1] + 1, limit), text.rfind("\n", borders[-1] + 1, limit))
        borders.append(space if space > 0 else limit)
    return borders
