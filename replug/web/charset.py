"""From a page's bytes to its text: the encoding is said by a mark, the header or the page itself, else it is guessed.

An encoding is a name that a stranger gave, and Python has some that are no encoding of texts (`unicode_escape`, `idna`,
`utf-7`): only those of a list are taken. Bytes that do not fit are shown as U+FFFD and counted: a page of which a tenth
is broken is not read.
"""

import codecs
import re
from dataclasses import dataclass

import charset_normalizer

from replug.web.fetch_failure import FetchFailed

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
IN_HEADER = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
IN_PAGE = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
PAGE_HEAD = 4096  # bytes in which a page says its encoding; browsers look into 1,024
SAMPLE = 65_536  # bytes by which an encoding is guessed
TEXT_ENCODINGS = re.compile(
    r"utf-8|utf-16(-le|-be)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]|mac-\w+|"
    r"shift_jis|euc_jp|iso2022_jp|euc_kr|gb2312|gbk|gb18030|big5|big5hkscs"
)
AS_BROWSERS = {"ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932"}
MOST_BROKEN = 0.1  # share of characters
BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class DecodedText:
    """`broken` counts the characters that stand for bytes which did not fit."""

    text: str
    encoding: str
    broken: int


def decode_page(body: bytes, content_type: str) -> DecodedText:
    """Raises FetchFailed where too much does not fit."""
    for mark, encoding in MARKS.items():
        if body.startswith(mark):
            return _decoded(body[len(mark) :], encoding)
    header, page = IN_HEADER.search(content_type), IN_PAGE.search(body[:PAGE_HEAD])
    said = (header and _known(header[1])) or (page and _known_of_page(page[1].decode("ascii")))
    return _decoded(body, said or _guessed(body))


def _known_of_page(label: str) -> str | None:
    """What a page says of itself in ASCII, so that it is not in UTF-16."""
    encoding = _known(label)
    return "utf-8" if encoding and encoding.startswith("utf-16") else encoding


def _known(label: str) -> str | None:
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return None
    name = AS_BROWSERS.get(name, name)
    return name if TEXT_ENCODINGS.fullmatch(name) else None


def _guessed(body: bytes) -> str:
    try:
        body.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        found = charset_normalizer.from_bytes(body[:SAMPLE]).best()
        return (_known(found.encoding) if found else None) or "cp1252"


def _decoded(body: bytes, encoding: str) -> DecodedText:
    text = body.decode(encoding, errors="replace")
    broken = text.count(BROKEN) - body.count(BROKEN.encode()) if encoding == "utf-8" else text.count(BROKEN)
    if broken > MOST_BROKEN * len(text):
        raise FetchFailed("encoding")
    return DecodedText(text, encoding, broken)
