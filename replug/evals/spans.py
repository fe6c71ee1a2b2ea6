"""Cut whole texts into spans, which score every token once, and draw the spans to measure.

A span's tokens are scored after `context_tokens` of the preceding text, and documents are retrieved for its last
`query_tokens` (In-Context RALM's query length; REPLUG has 128 of each). The first span of a text has no query, so every
method scores it without documents, and it counts. With `texts.join` this concerns only the first of all texts, as in
the authors' code for Wikitext.

Wikitext's perplexity by word (Merity et al. 2016) counts the words of the published text, and each line end, its
`<eos>`. An LM with another vocabulary reads the text in usual writing, and its bits are divided by the number of words
of the original (Radford et al. 2019, section 3.1). A word split between spans counts once, in the span of its first
character. Pure.
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
# The rules of published evaluations (Megatron-LM, lm-evaluation-harness), except replacements of letters: they also
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
    """Return the start positions of the words and line ends of a text, in order."""
    return [found.start() for found in WORD_OR_LINE_END.finditer(text)]


def detokenized_wikitext(text: str) -> tuple[str, list[int]]:
    """Return Wikitext in usual writing, and the start positions in it of the original's words and line ends.

    Lines are converted one by one, which keeps their ends.
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
    """Return a line in usual writing, and the start positions of its words; other characters than `_JOINED` stay."""
    joined = {found.start() + 1 for found in _JOINED.finditer(line)}
    lengths = [1 if word.start() in joined else len(word.group()) for word in WORD.finditer(line)]
    written = _JOINED.sub(r"\1", line)
    for pattern, replacement in _SPACES:
        written = pattern.sub(replacement, written)
    visible = [place for place, character in enumerate(written) if not character.isspace()]
    assert len(visible) == sum(lengths), f"detokenizing changed more than white space of {line!r}"
    return written, [visible[first] for first in itertools.accumulate(lengths[:-1], initial=0)] if lengths else []


ROOM = 16  # tokens of the LM's context reserved for special tokens, and for a cut word


@dataclass(frozen=True, slots=True)
class ScoredSpan(Example):
    """An example cut from a text: `source` is the text's id, `query` the end of the preceding text, for retrieval.

    `num_words` words and line ends begin in it. `start` is its position in the text, in characters. `long_context` is
    the preceding text up to the LM's limit, None if no method reads it.
    """

    num_words: int = 0
    start: int = 0
    long_context: str | None = None


class TokenBorders:
    """The character positions of token ends in a text; white space before a word is part of its first token.

    A character that several tokens share belongs to the earlier ones.
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
        """Return the start position of a token; the text's length beyond the last token."""
        if token <= 0:
            return 0
        return self._length if token >= len(self) else self._ends[token - 1]

    def token_at(self, place: int) -> int:
        """Return the number of tokens that end at a position or before it."""
        return bisect_right(self._ends, place)


def scored_span(example: Example) -> ScoredSpan:
    """Return an example as a span, with its number of words."""
    if isinstance(example, ScoredSpan):
        return example
    begun = unit_starts(example.context + example.continuation)
    num_words = sum(start >= len(example.context) for start in begun)
    own = {field.name: getattr(example, field.name) for field in fields(Example)}
    return ScoredSpan(**own, num_words=num_words)


def spans_of(
    text: SourceText, unit_starts: Sequence[int], tokenizer: Tokenizer, keys: TextsConfig
) -> Iterator[ScoredSpan]:
    """Yield the spans of a text in order, named by their position in the text; the last may be shorter.

    `unit_starts` are the positions, in the text that the LM reads, of the words and line ends of the original.
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
    """Return all texts joined, and its spans: `source` is the text at a span's start, `start` is in the joined text."""
    offsets = [0, *itertools.accumulate(len(text.text) for text in texts)]
    whole = SourceText("", "".join(text.text for text in texts), "")
    begun = [start + offset for starts, offset in zip(unit_starts, offsets, strict=False) for start in starts]
    spans = []
    for span in spans_of(whole, begun, tokenizer, keys):
        own = texts[bisect_right(offsets, span.start) - 1]
        spans.append(replace(span, id=f"{own.id}{span.id}", source=own.id, domain=own.domain))
    return whole.text, spans


def long_context(text: str, borders: TokenBorders, span: ScoredSpan, max_tokens: int | None) -> str:
    """Return the end of the preceding text that fits beside a span into `max_tokens` LM tokens, given their borders."""
    if max_tokens is None:
        return text[: span.start]
    first, last = borders.token_at(span.start), borders.token_at(span.start + len(span.continuation))
    return text[borders.before(first - max(0, max_tokens - ROOM - (last - first))) : span.start]


def draw_evenly(num_all: int, num: int | None, seed: int) -> list[int]:
    """Draw `num` rows in order, one from each of `num` equal parts; None or too large a number means all.

    Rows of a text are adjacent, so the number of rows drawn from a text is proportional to its length.
    """
    if num is None or num >= num_all:
        return list(range(num_all))
    borders = np.arange(num + 1) * num_all // num
    return [int(row) for row in np.random.default_rng([seed, 4]).integers(borders[:-1], borders[1:])]
