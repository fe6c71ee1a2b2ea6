"""Whole texts as spans in which every token is scored once, and which of them are measured.

A span's tokens are scored after `context_tokens` of the text before, and documents are retrieved for the last
`query_tokens` of it (In-Context RALM's query length; REPLUG has 128 of each). The first span of a text has nothing
before it: nothing can be retrieved for it, so it is scored without documents under every method, and counted. With
`texts.join` that is the first span of all texts alone, as in the authors' code for Wikitext.

Wikitext's perplexity by word (Merity et al. 2016) counts the words of the text as it is published, and each line's end,
its `<eos>`. An LM with tokens of its own reads the text with the spaces of usual writing, and its bits are divided by
the words of the original (Radford et al. 2019, section 3.1). A word that is read in two pieces counts once, where its
first character is. Pure.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from tokenizers import Tokenizer

from replug.config.evaluation_schema import TextsConfig
from replug.data.records import Example
from replug.data.sources.records import SourceText
from replug.data.tokenizing import token_ends

WORD = re.compile(r"\S+")
WORD_OR_LINE_END = re.compile(r"\S+|\n")
LINE = re.compile(r"[^\n]*\n|[^\n]+")

# Wikitext writes a hyphen within a word as ` @-@ `.
_JOINED = re.compile(r"(?<=\S) @([-,.])@ (?=\S)")
# As the published evaluations have it (Megatron-LM, lm-evaluation-harness), without what changes letters: they also
# write ` N `, a number of the Penn Treebank, as ` 1 `.
_SPACES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"s '", "s'"),
        *((rf" {re.escape(sign)} ", f"{sign} ") for sign in ":;.!?,"),
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" ° ", "°"),
        (" 's", "'s"),
        (r"^ | $", ""),
    )
]


def unit_starts(text: str) -> list[int]:
    """Return the characters at which the words and line ends of a text begin, in order."""
    return [found.start() for found in WORD_OR_LINE_END.finditer(text)]


def detokenized_wikitext(text: str) -> tuple[str, list[int]]:
    """Return Wikitext in usual writing, and where in it the words and line ends of the original begin.

    Lines are taken one by one, so that their ends stay.
    """
    parts, starts, length = [], [], 0
    for line in LINE.findall(text):
        body = line.removesuffix("\n")
        written, own = _detokenized_line(body)
        starts += [length + start for start in own]
        parts.append(written)
        length += len(written)
        if body != line:
            starts.append(length)
            parts.append("\n")
            length += 1
    return "".join(parts), starts


def _detokenized_line(line: str) -> tuple[str, list[int]]:
    """Return a line in usual writing, and where its words begin: visible characters stay, but for `_JOINED`."""
    joined = {found.start() + 1 for found in _JOINED.finditer(line)}
    lengths = [1 if word.start() in joined else len(word.group()) for word in WORD.finditer(line)]
    written = _JOINED.sub(r"\1", line)
    for pattern, replacement in _SPACES:
        written = pattern.sub(replacement, written)
    visible = [place for place, character in enumerate(written) if not character.isspace()]
    assert len(visible) == sum(lengths), f"detokenizing changed more than white space of {line!r}"
    return written, [visible[first] for first in itertools.accumulate(lengths[:-1], initial=0)] if lengths else []


ROOM = 16  # tokens of what the LM holds that are left for those that begin its input, and for a word that is cut


@dataclass(frozen=True, slots=True)
class ScoredSpan(Example):
    """An example of a text: `source` is the text, and `query` the part of it before that documents are retrieved for.

    `num_words` words and line ends begin in it. `start` is its place in the text, in characters. `long_context` is as
    much of the text before as the LM holds, where a method reads that.
    """

    num_words: int = 0
    start: int = 0
    long_context: str | None = None


class TokenBorders:
    """The characters at which the tokens of a text end; white space before a word is part of its first token.

    A character that several tokens share stays whole, in the earlier ones.
    """

    def __init__(self, text: str, ends: Sequence[int]) -> None:
        self._ends = ends
        self._length = len(text)

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> "TokenBorders":
        return cls(text, token_ends(tokenizer, [text])[0])

    def __len__(self) -> int:
        return len(self._ends)

    def before(self, token: int) -> int:
        """Return the character that a token begins at; the text's length where there is no such token."""
        if token <= 0:
            return 0
        return self._length if token >= len(self) else self._ends[token - 1]

    def token_at(self, place: int) -> int:
        """Count the tokens that end at a character or before it."""
        return bisect_right(self._ends, place)


def scored_span(example: Example) -> ScoredSpan:
    """Return an example that is measured as it is."""
    if isinstance(example, ScoredSpan):
        return example
    begun = unit_starts(example.context + example.continuation)
    num_words = sum(start >= len(example.context) for start in begun)
    own = {field.name: getattr(example, field.name) for field in fields(Example)}
    return ScoredSpan(**own, num_words=num_words)


def spans_of(
    text: SourceText, unit_starts: Sequence[int], tokenizer: Tokenizer, keys: TextsConfig
) -> Iterator[ScoredSpan]:
    """Yield the spans of a text in order, each called by its place in the text; the last may be shorter.

    The text is as the LM reads it; `unit_starts` are where the words and line ends of the original begin in it.
    """
    borders, starts = TokenBorders.of(tokenizer, text.text), np.array(unit_starts)
    for first in range(0, max(1, len(borders)), keys.scored_tokens):
        start, end = borders.before(first), borders.before(first + keys.scored_tokens)
        if end > start:
            yield ScoredSpan(
                id=f"{text.id}#{start}-{end}",
                context=text.text[borders.before(first - keys.context_tokens) : start],
                continuation=text.text[start:end],
                domain=text.domain,
                source=text.id,
                query=text.text[borders.before(first - keys.query_tokens) : start],
                num_words=int(((starts >= start) & (starts < end)).sum()),
                start=start,
            )


def joined_spans(
    texts: Sequence[SourceText], unit_starts: Sequence[Sequence[int]], tokenizer: Tokenizer, keys: TextsConfig
) -> tuple[str, list[ScoredSpan]]:
    """Return all texts joined, and the spans of that: `source` is the text that one begins in, `start` is in all."""
    offsets = [0, *itertools.accumulate(len(text.text) for text in texts)]
    whole = SourceText("", "".join(text.text for text in texts), "")
    begun = [start + offset for starts, offset in zip(unit_starts, offsets, strict=False) for start in starts]
    spans = []
    for span in spans_of(whole, begun, tokenizer, keys):
        own = texts[bisect_right(offsets, span.start) - 1]
        spans.append(replace(span, id=f"{own.id}{span.id}", source=own.id, domain=own.domain))
    return whole.text, spans


def long_context(text: str, borders: TokenBorders, span: ScoredSpan, max_tokens: int | None) -> str:
    """Return the end of the text before a span that an LM of so many tokens holds with it; `borders` are the LM's."""
    if max_tokens is None:
        return text[: span.start]
    first, last = borders.token_at(span.start), borders.token_at(span.start + len(span.continuation))
    return text[borders.before(first - max(0, max_tokens - ROOM - (last - first))) : span.start]


def draw_evenly(num_all: int, num: int | None, seed: int) -> list[int]:
    """Draw so many rows in order, one from each of as many equal parts of them all; all where there are no more.

    Rows of a text stand together, so a text is drawn from in proportion to its length.
    """
    if num is None or num >= num_all:
        return list(range(num_all))
    borders = np.arange(num + 1) * num_all // num
    return [int(row) for row in np.random.default_rng([seed, 4]).integers(borders[:-1], borders[1:])]
