"""Cut prose where its author made a border: at headings, ends of sentences and lines, within a limit of tokens. Pure.

Short sections are joined, long ones cut into even pieces. A piece without a border in reach, such as program code on
one line, ends at a token. Headings are underlined (reStructuredText, Markdown) or begin with `#` (Markdown);
`data.sources.texts` has converted other markup to Markdown.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from replug.data.words import search_words

LINE = re.compile(r"[^\n]*\n|[^\n]+\Z")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
ATX = re.compile(r"(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*\n?\Z")
LONGEST_HEADING = 200  # characters
NO_TITLE = " \t-|>$%#!;{}&"  # before code, options, tables and quotes
UNDERLINE = re.compile(r"([=\-~^\"'`#*+:.<>_])\1{2,}[ \t]*\n?\Z")
MARKS = re.compile(r"\[([^\]]*)\]\([^)]*\)|[*`]+")  # of a heading: a link keeps its words

# A paragraph's end, the line before a list's item, or a sentence's end, which stands before white space.
BORDER = re.compile(
    r"(?P<break>\n(?=[ \t]*\n)|\n(?=[ \t]*(?:[-*+•]|\d{1,3}[.)])[ \t]))"
    r"|[.!?…।॥؟۔][\"')\]}»”’*_`]*(?=\s)|[。！？][\"」』）]*"
)
ABBREVIATION = re.compile(
    r"(?:\b[A-Za-z]|\b(?:Mr|Mrs|Ms|Dr|Prof|St|Fig|Figs|Eq|Eqs|Sec|No|vs|etc|cf|al|ca|approx|Vol|pp|eds?|Inc|Ltd|Jr|Sr))\Z"
)

# Each part of a link has a maximum length, else a line of brackets takes quadratic time.
LINK = re.compile(
    r"!?\[[^\]]{0,500}\]\([^)]{0,2000}\)|\[[^\]]{0,500}\]\[[^\]]{0,500}\]|\[[^\]]{1,500}\]:\s*\S+|"
    r"`[^`<]{0,500}<[^>]{1,2000}>`_{1,2}|:\w{1,50}:`[^`]{0,500}`|<?https?://\S+"
)
LEADERS = re.compile(r"(?:\.[ ]?){4}\s*\w+\s*\Z")  # "Installation ........ 12"
DIRECTIVE = re.compile(r"\.\.\s|\s+:[\w-]+:(?:\s|\Z)")  # of reStructuredText with its options, a comment or a target
WORD = re.compile(r"\w{2,}")
WORDS_BESIDE_A_LINK = 3  # or fewer: the line only points elsewhere


class Section(NamedTuple):
    """The text from a heading to the next one; `body` is where the heading ends, `path` the headings above and it."""

    start: int
    body: int
    end: int
    level: int
    path: tuple[str, ...]


def points_elsewhere(text: str) -> bool:
    """Return whether most lines are links, directives, or entries of a table of contents."""
    lines = [line for line in text.splitlines() if WORD.search(line)]
    return 2 * sum(map(_is_pointer, lines)) > len(lines)


def _is_pointer(line: str) -> bool:
    rest, links = LINK.subn(" ", line)
    if links:
        return len(search_words(rest)) <= WORDS_BESIDE_A_LINK
    *bullet, last = line.split()
    is_path = "/" in last and (not bullet or bullet in (["-"], ["*"], ["+"]))  # of a toctree
    return bool(is_path or LEADERS.search(line) or DIRECTIVE.match(line))


class Prose:
    """A text with its borders, and `ends` [tokens] of its tokens, as places of characters."""

    def __init__(self, text: str, ends: Sequence[int]) -> None:
        self.text, self._ends = text, np.asarray(ends, np.int64)
        headings, fences, lines = _scan(text)
        self._sections = list(_sections(text, headings))
        borders = [match for match in BORDER.finditer(text) if _ends_a_sentence(text, match)]
        sentences = np.array([m.start() if m["break"] else m.end() for m in borders], np.int64)
        begun, ended = np.array([(0, 0), *fences], np.int64).T
        sentences = sentences[sentences >= ended[np.searchsorted(begun, sentences) - 1]]  # not within a block
        others = [section.start for section in self._sections] + [place for fence in fences for place in fence]
        self._sentences = np.union1d(sentences, np.array(others, np.int64))
        self._lines = np.array(lines, np.int64)

    def documents(self, limit: int) -> Iterator[tuple[str, str]]:
        """Yield title and text of each document, together of at most `limit` tokens by the text's own."""
        for first, *others in self._groups(limit):
            path, start = first.path, first.body
            if any(section.level <= first.level for section in others):  # their own headings stay in the text
                path, start = first.path[:-1], first.start
            title, length = self._title(path, limit // 3)
            start = start if title else first.start
            for a, b in self._cut(start, (others or [first])[-1].end, limit - length):
                if body := self.text[a:b].strip():
                    yield title, body

    def examples(self, limit: int) -> Iterator[tuple[str, str]]:
        """Yield contexts and continuations of at most `limit` tokens each; an empty pair for too short a text."""
        for sections in self._groups(2 * limit):
            for start, end in self._cut(sections[0].start, sections[-1].end, 2 * limit):
                total = self._count(start, end)
                if total < max(2, limit // 2):
                    yield "", ""
                    continue
                shortest = max(total - limit, total // 4, 1)
                border = self._border(start, total / 2, shortest, min(limit, total - shortest))
                yield self.text[start:border].lstrip(), self.text[border:end].rstrip()

    def _groups(self, limit: int) -> Iterator[list[Section]]:
        """Yield sections that stand together: short ones, as long as they fit."""
        group: list[Section] = []
        for section in self._sections:
            so_far = self._count(group[0].start, group[-1].end) if group else limit
            is_below = bool(group) and section.level >= group[0].level
            if so_far < (limit // 2 if is_below else limit // 4) and self._count(group[0].start, section.end) <= limit:
                group.append(section)
                continue
            if group:
                yield group
            group = [section]
        if group:
            yield group

    def _title(self, path: tuple[str, ...], limit: int) -> tuple[str, int]:
        """Return the innermost headings that fit, and about how many tokens they have."""
        kept: list[str] = []
        length = 0
        for heading in reversed(path):
            tokens = len(heading.encode()) // 3 + 2  # three bytes a token: rarely an underestimate
            if length + tokens > limit:
                break
            kept, length = [heading, *kept], length + tokens
        return " > ".join(kept), length

    def _count(self, start: int, end: int) -> int:
        first, last = np.searchsorted(self._ends, (start, end), "right").tolist()
        return last - first

    def _cut(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """Yield even pieces of at most `limit` tokens."""
        while (total := self._count(start, end)) > limit:
            border = self._border(start, total / -(-total // limit), limit // 4, limit)
            if border >= end:
                break
            yield start, border
            start = border
        yield start, end

    def _border(self, start: int, aim: float, shortest: int, longest: int) -> int:
        """Return the border nearest to `aim` tokens behind `start`: a sentence's, else a line's, else a token's."""
        first = int(np.searchsorted(self._ends, start, "right"))
        low, high = (int(self._ends[first + number - 1]) for number in (max(shortest, 1), longest))
        for borders in (self._sentences, self._lines):
            near = borders[np.searchsorted(borders, low) : np.searchsorted(borders, high, "right")]
            if len(near):
                counts = np.searchsorted(self._ends, near, "right") - first
                return int(near[np.argmin(np.abs(counts - aim))])
        return max(int(self._ends[first + max(1, round(aim)) - 1]), start + 1)


def _scan(text: str) -> tuple[list[tuple[int, int, int, str]], list[tuple[int, int]], list[int]]:
    """Return headings (start, end, level, title), fenced blocks, and the ends of lines."""
    headings, fences, ends = [], [], []
    styles: dict[tuple[str, bool], int] = {}
    fence, fence_mark = -1, ""
    before = above = (0, "")  # the two lines before: start and text
    for match in LINE.finditer(text):
        start, line = match.start(), match[0]
        ends.append(match.end() - line.endswith("\n"))
        under = UNDERLINE.match(line) if fence < 0 else None
        if under and _is_title(before[1], line, under[1], above[1]):
            is_over = above[1].rstrip() == line.rstrip()
            level = styles.setdefault((under[1], is_over), len(styles) + 1)
            headings.append((above[0] if is_over else before[0], match.end(), level, _plain(before[1])))
        elif fence >= 0:
            closes = FENCE.match(line)
            if closes and closes[1].startswith(fence_mark) and not closes[2].strip():
                fences.append((fence, match.end()))
                fence = -1
        elif (opens := FENCE.match(line)) and (opens[1][0] == "~" or "`" not in opens[2]):  # or it is code in a line
            fence, fence_mark = start, opens[1]
        elif len(line) < LONGEST_HEADING and (atx := ATX.match(line)) and atx[2]:
            headings.append((start, match.end(), len(atx[1]), _plain(atx[2])))
        above, before = before, (start, line)
    return headings, fences, ends


def _is_title(title: str, underline: str, mark: str, above: str) -> bool:
    """Return whether an underlined line is a heading: it stands alone, and its underline is about as long or longer."""
    words = title.strip()
    if not words or title[0] in NO_TITLE or UNDERLINE.match(title) or len(words) > LONGEST_HEADING:
        return False
    is_alone = not above.strip() or above.rstrip() == underline.rstrip()
    return is_alone and (mark in "=-" or len(underline.rstrip()) >= len(words))


def _plain(heading: str) -> str:
    return MARKS.sub(lambda match: match[1] or "", heading).strip()


def _sections(text: str, headings: list[tuple[int, int, int, str]]) -> Iterator[Section]:
    first = headings[0][0] if headings else len(text)
    if text[:first].strip():
        yield Section(0, 0, first, 0, ())
    path: list[tuple[int, str]] = []
    for (start, body, level, title), after in pairwise([*headings, (len(text), 0, 0, "")]):
        path = [*(above for above in path if above[0] < level), (level, title)]
        yield Section(start, body, after[0], level, tuple(heading for _, heading in path))


def _ends_a_sentence(text: str, match: re.Match[str]) -> bool:
    if match["break"] or match[0][0] not in ".":
        return True
    follows = text[match.end() : match.end() + 40].lstrip()[:1]
    return not follows.islower() and not ABBREVIATION.search(text[max(0, match.start() - 8) : match.start()])
