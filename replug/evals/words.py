"""Words and line ends of a text, by which the literature divides its perplexity, and where they are in what LMs read.

Wikitext's perplexity by word (Merity et al. 2016) counts the words of the text as it is published, which stand between
white space, and each line's end, its `<eos>`; an LM with tokens of its own reads the text with the spaces of usual
writing, and its bits are still divided by the words of the original (Radford et al. 2019, section 3.1; Shoeybi et al.
2019). A word that is read in two pieces counts once, where its first character is. Pure.
"""

import itertools
import re

WORD = re.compile(r"\S+")
WORD_OR_LINE_END = re.compile(r"\S+|\n")
LINE = re.compile(r"[^\n]*\n|[^\n]+")

# What Wikitext writes ` @-@ ` was a hyphen within a word.
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
    """Where the words of a text begin, and its line ends, in order: places of characters."""
    return [found.start() for found in WORD_OR_LINE_END.finditer(text)]


def detokenized_wikitext(text: str) -> tuple[str, list[int]]:
    """Wikitext in usual writing, and where in it the words and line ends of the original begin.

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
    """Only white space changes beside the signs of `_JOINED`, so visible characters tell where each word is."""
    joined = {found.start() + 1 for found in _JOINED.finditer(line)}
    lengths = [1 if word.start() in joined else len(word.group()) for word in WORD.finditer(line)]
    written = _JOINED.sub(r"\1", line)
    for pattern, replacement in _SPACES:
        written = pattern.sub(replacement, written)
    visible = [place for place, character in enumerate(written) if not character.isspace()]
    assert len(visible) == sum(lengths), f"detokenizing changed more than white space of {line!r}"
    return written, [visible[first] for first in itertools.accumulate(lengths[:-1], initial=0)] if lengths else []
