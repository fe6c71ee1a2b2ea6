"""Read files of markup: Markdown without comments and front matter, and the main texts of HTML files as Markdown.

HTML is read by what `replug ask` reads pages with, which comes with the extra `web`: a page here is as hostile.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from replug.config.errors import require_extra

FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*\n", re.DOTALL)
FRONT_TITLE = re.compile(r"^title:[ \t]*[\"']?(.*?)[\"']?[ \t]*$", re.MULTILINE)

MainTexts = Callable[[bytes], str | None]  # None for a page without a main text, or one that keeps the parser busy


def plain_markup(text: str) -> str:
    """Return the text without comments and front matter, whose title becomes the first heading."""
    text = _without_comments(text)
    if (front := FRONT_MATTER.match(text)) is None:
        return text
    title = FRONT_TITLE.search(front[1])
    return (f"# {title[1]}\n\n" if title and title[1] else "") + text[front.end() :]


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
    from replug.web.extraction import Extractor, decode_page
    from replug.web.fetch import FetchFailed

    with closing(Extractor(with_headings=True)) as extractor:

        def read(body: bytes) -> str | None:
            try:
                page = extractor.extract(decode_page(body, "")[0])
            except FetchFailed:
                return None
            return page.text if page.text.startswith("#") or not page.title else f"# {page.title}\n\n{page.text}"

        yield read
