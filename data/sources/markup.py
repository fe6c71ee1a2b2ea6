"""Read files of markup as Markdown: without comments and front matter, from AsciiDoc and HTML.

HTML is read by what `replug ask` reads pages with, which comes with the extra `web`: a page here is as hostile.
"""

import bisect
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from replug.config.errors import require_extra

FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*\n", re.DOTALL)
FRONT_TITLE = re.compile(r"^title:[ \t]*[\"']?(.*?)[\"']?[ \t]*$", re.MULTILINE)

PLAIN = (".txt", ".text")
ASCIIDOC = (".adoc", ".asciidoc")  # suffixes
# Marks of AsciiDoc alone, for texts without its suffix: attributes of blocks, directives, tables, own links.
ASCIIDOC_MARK = re.compile(
    r"^(?:\[(?:source|listing|verse|quote|horizontal|NOTE|TIP|IMPORTANT|WARNING|CAUTION|(?:cols|options)=)[^\]\n]*\]|\[\[[\w-]+\]\]|"
    r"(?:include|ifdef|ifndef|ifeval|endif)::\S*\[.*\]|\|===)[ \t]*$|\blinkgit:[\w-]+\[\d\]",
    re.MULTILINE,
)
ASCIIDOC_HEADING = re.compile(r"(={1,6})[ \t]+(\S.*?)(?:[ \t]+=+)?[ \t]*\Z")
ASCIIDOC_UNDERLINES, NEARLY = "=-~^+", 2  # marks of the levels, and how much longer or shorter than its title a line is
ASCIIDOC_BLOCK = re.compile(r"(?:([-.+/=*_])\1{3,}|--|`{3,}.*)[ \t]*\Z")
VERBATIM = "-.+`/"  # blocks of code, output, passed-through text and comments; the others hold prose
ASCIIDOC_UNREAD = re.compile(
    r"\[\[?[^\[\]]*\]?\][ \t]*\Z|:!?[\w-]+!?:(?:[ \t].*)?\Z|//|\+[ \t]*\Z|\|===[ \t]*\Z|\w+::\S*\[.*\][ \t]*\Z"
)
ASCIIDOC_LINK = re.compile(
    r"(?:link|xref|mailto|linkgit):([^\s\[\]]{1,500})\[([^\]\n]{0,500})\]|<<[^,<>\n]{1,200},([^<>\n]{1,500})>>"
)

MainTexts = Callable[[bytes], str | None]  # None for a page without a main text, or one that keeps the parser busy


def plain_markup(text: str, suffix: str) -> str:
    """Return a text as Markdown without comments and front matter; its title becomes the first heading.

    AsciiDoc is told by the file's suffix or, in a `.txt`, by its own marks (Git's manuals are such).
    """
    if suffix in ASCIIDOC or (suffix in PLAIN and ASCIIDOC_MARK.search(text)):
        return asciidoc_as_markdown(text)
    if suffix in PLAIN:
        return text
    text = _without_comments(text)
    if (front := FRONT_MATTER.match(text)) is None:
        return text
    title = FRONT_TITLE.search(front[1])
    return (f"# {title[1]}\n\n" if title and title[1] else "") + text[front.end() :]


def asciidoc_as_markdown(text: str) -> str:
    """Return AsciiDoc with Markdown's headings and blocks of code, without attributes, directives and comments."""
    lines, kept, place = text.split("\n"), list[str](), 0
    places: dict[str, list[int]] = {}  # of each line that may end a block
    for number, line in enumerate(lines):
        if ASCIIDOC_BLOCK.match(line):
            places.setdefault(line.rstrip(), []).append(number)
    while place < len(lines):
        line = lines[place].rstrip()
        following = lines[place + 1].rstrip() if place + 1 < len(lines) else ""
        place += 1
        if heading := ASCIIDOC_HEADING.match(line):
            kept.append(f"{'#' * len(heading[1])} {heading[2]}")
        elif level := _underlined_level(line, following):
            kept.append(f"{'#' * level} {line}")
            place += 1
        elif ASCIIDOC_BLOCK.match(line):
            closing = places.get("```" if line.startswith("```") else line, [])
            end = bisect.bisect_left(closing, place)
            if line == "--" or line[0] not in VERBATIM or end == len(closing):
                continue  # it stands round prose, or opens nothing
            kept += ["```", *lines[place : closing[end]], "```"] if line[0] != "/" else []
            place = closing[end] + 1
        elif not ASCIIDOC_UNREAD.match(line):
            kept.append(ASCIIDOC_LINK.sub(lambda link: link[2] or link[3] or link[1] or "", line))
    return "\n".join(kept)


def _underlined_level(title: str, underline: str) -> int:
    """Return the level of a title with a line below it, 0 for what is none: it is as long as its line, or nearly."""
    is_line = len(underline) > 1 and underline[0] in ASCIIDOC_UNDERLINES and set(underline) == {underline[0]}
    is_title = is_line and title[:1].isalnum() and abs(len(title) - len(underline)) <= NEARLY
    return ASCIIDOC_UNDERLINES.index(underline[0]) + 1 if is_title else 0


def _without_comments(text: str) -> str:
    """Search once, whatever the text: an expression would search to the end for every comment that has none."""
    kept, place = [], 0
    while (start := text.find("<!--", place)) >= 0 and (end := text.find("-->", start)) >= 0:
        kept.append(text[place:start])
        place = end + len("-->")
    return "".join([*kept, text[place:]])


def require_html(source: str) -> None:
    """Raise UserError where a module that reads HTML is missing."""
    modules = ("trafilatura", "lxml_html_clean", "charset_normalizer", "httpcore", "protego")
    require_extra("web", *modules, what=f"data.source: {source} has HTML files, and reading them")


@contextmanager
def main_texts() -> Iterator[MainTexts]:
    """Start the process that reads pages; it ends with the block."""
    from replug.web.extraction import Extractor, FetchFailed, decode_page

    with closing(Extractor(with_headings=True)) as extractor:

        def read(body: bytes) -> str | None:
            try:
                text, title = extractor.extract(decode_page(body, "")[0])
            except FetchFailed:
                return None
            return text if text.startswith("#") or not title else f"# {title}\n\n{text}"

        yield read
