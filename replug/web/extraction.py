"""Turn a page's bytes into its main text: unpack, decode, extract.

A page names its encoding, and some of Python's codecs are unsafe for web pages (`unicode_escape`, `utf-7`): only the
encodings in TEXT_ENCODINGS are used. Undecodable bytes become U+FFFD.

Some HTML keeps a parser busy for hours, and a parser is C code. So trafilatura runs in a separate process,
`python -m replug.web.extraction SECONDS [headings]`, with limits of time and memory; it ends with its caller. An input
line is a page as a JSON string, an output line is `{"text", "title"}`. trafilatura never gets a URL, so it fetches
nothing.
"""

import codecs
import gzip
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import zlib
from contextlib import suppress
from typing import Any

from replug.cluster.environment import limit_process
from replug.config.errors import RunError


class FetchFailed(Exception):
    """A page without a result. `reason` is a name to count by; it holds no text of the page."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


ACCEPTED = "gzip"


def unpacked(body: bytes, coding: str, limit: int) -> bytes:
    """Return a decompressed body. Raises FetchFailed if it is damaged or has more than `limit` bytes.

    Decompression stops at the limit, so a decompression bomb takes no more memory than an honest page.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in (ACCEPTED, f"x-{ACCEPTED}"):  # including gzip of gzip
        raise FetchFailed("content_encoding")
    try:
        with gzip.open(io.BytesIO(body)) as file:
            out = file.read(limit + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise FetchFailed("content_encoding") from error
    if len(out) > limit:
        raise FetchFailed("too_large")
    return out


# Encodings -----------------------------------------------------------------------------------------------------------

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
IN_HEADER = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
IN_PAGE = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
HEAD_BYTES = 4096  # searched for the declared encoding; browsers search 1,024
SAMPLE_BYTES = 65_536  # for guessing an encoding
TEXT_ENCODINGS = re.compile(
    r"utf-8|utf-16(-le|-be)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]|mac-\w+|"
    r"shift_jis|euc_jp|iso2022_jp|euc_kr|gb2312|gbk|gb18030|big5|big5hkscs"
)
AS_BROWSERS = {"ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932"}
MAX_BROKEN_SHARE = 0.1
BROKEN = "\ufffd"


def decode_page(body: bytes, content_type: str) -> str:
    """Return the text. Raises FetchFailed if more than a tenth of its characters cannot be decoded."""
    mark = next((mark for mark in MARKS if body.startswith(mark)), b"")
    body, encoding = body[len(mark) :], MARKS.get(mark) or _encoding(body, content_type)
    text = body.decode(encoding, errors="replace")
    broken = text.count(BROKEN) - (body.count(BROKEN.encode()) if encoding == "utf-8" else 0)
    if broken > MAX_BROKEN_SHARE * len(text):
        raise FetchFailed("encoding")
    return text


def _encoding(body: bytes, content_type: str) -> str:
    """Return the encoding that the header names, else the page names, else the bytes suggest."""
    if (header := IN_HEADER.search(content_type)) and (known := _known(header[1])):
        return known
    if (page := IN_PAGE.search(body[:HEAD_BYTES])) and (known := _known(page[1].decode("ascii"))):
        return "utf-8" if known.startswith("utf-16") else known  # an ASCII declaration cannot stand in UTF-16
    try:
        body.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        import charset_normalizer

        guess = charset_normalizer.from_bytes(body[:SAMPLE_BYTES]).best()
        return (_known(guess.encoding) if guess else None) or "cp1252"


def _known(label: str) -> str | None:
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return None
    name = AS_BROWSERS.get(name, name)
    return name if TEXT_ENCODINGS.fullmatch(name) else None


# Main text -----------------------------------------------------------------------------------------------------------

SECONDS = 20.0  # of CPU time: a busy machine makes no page fail
MAX_MEMORY_BYTES = 4 * 2**30  # of address space
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")  # the process that reads pages never gets a key
READY = "ready"
CODE, WHITE_SPACE = ("code", "kbd", "samp", "tt"), re.compile(r"\s+")


class Extractor:
    """Extract main texts, one at a time. The process starts with the first page; `close` ends it."""

    def __init__(self, seconds: float = SECONDS, with_headings: bool = False) -> None:
        """Give texts as Markdown if `with_headings`."""
        self._options = [str(seconds), *(["headings"] if with_headings else [])]
        self._process: subprocess.Popen[str] | None = None

    def extract(self, html: str) -> tuple[str, str]:
        """Return main text and title.

        Raises FetchFailed for a page that crashes the process, takes too long, or has no text.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        line = ""  # empty at the end of the process
        with suppress(BrokenPipeError):
            print(json.dumps(html), file=process.stdin, flush=True)
            line = process.stdout.readline()
        if not line:
            code = process.wait()
            self.close()
            raise FetchFailed("extraction_timeout" if code == -signal.SIGPROF else "extraction_failed")
        main = json.loads(line)
        if not main["text"].strip():
            raise FetchFailed("no_text")
        return main["text"], main["title"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            # -P: no module of the working folder
            [sys.executable, "-P", "-m", "replug.web.extraction", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            process.kill()
            raise RunError("the process that reads pages did not start; see its error above")
        return process


def run_process() -> None:
    """Answer the lines of standard input until its end; a page beyond a limit ends the process."""
    # Import before READY: this takes a second.
    from trafilatura import bare_extraction
    from trafilatura.utils import load_html

    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    print(READY, file=answers, flush=True)
    # Keep the parser's messages about pages off the user's terminal.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    limit_process(MAX_MEMORY_BYTES)
    seconds, with_headings = float(sys.argv[1]), sys.argv[2:] == ["headings"]
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process even within C code
        tree = load_html(json.loads(line))
        main: Any = None
        if tree is not None:
            main = bare_extraction(
                _with_code_in_one_line(tree),
                include_comments=False,
                with_metadata=True,
                include_formatting=with_headings,
                date_extraction_params={"extensive_search": False},  # nothing reads the date
            )
        signal.setitimer(signal.ITIMER_PROF, 0)
        text, title = ("", "") if main is None else (main.text or "", main.title or "")
        print(json.dumps({"text": text, "title": title}), file=answers, flush=True)


def _with_code_in_one_line(tree: Any) -> Any:
    """Return a page with inline code on one line, as browsers show it; trafilatura would make blocks of its lines."""
    for code in tree.iter(*CODE):
        if not any(above.tag == "pre" for above in code.iterancestors()) and code.find(".//pre") is None:
            for line_break in list(code.iter("br")):
                line_break.tag = "span"
                line_break.text = " "
            for part in code.iter():
                part.text = WHITE_SPACE.sub(" ", part.text) if part.text else part.text
                if part is not code and part.tail:
                    part.tail = WHITE_SPACE.sub(" ", part.tail)
    return tree


if __name__ == "__main__":
    run_process()
