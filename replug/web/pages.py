"""From URLs to pages that have a text: fetched, decoded, stripped of menus, kept. Each URL is tried once a snapshot.

An encoding is said by a mark, the header or the page itself, else it is guessed. It is a name that a stranger gave, and
Python has some that are no encoding of texts (`unicode_escape`, `idna`, `utf-7`): only those of a list are taken. Bytes
that do not fit are shown as U+FFFD and counted: a page of which a tenth is broken is not read. trafilatura takes the
main text out, in a process of its own (`extraction_process`).

SNAPSHOT/searches/          what an engine answered to a query
SNAPSHOT/refused_searches/  why it did not; remove the folder to ask again
SNAPSHOT/pages/             main text, title, final URL, date; not the HTML
SNAPSHOT/failed_pages/      why a page gave nothing; remove the folder to try these again
SNAPSHOT/requests.json      the budget: requests to engines so far

An entry of the snapshot is a file with its own checksum, named by a hash of what was asked for and renamed when it is
whole. An entry that is damaged, or answers something else, is refused by its name: what replaced it would be another
snapshot. One process at a time writes to a folder.
"""

import asyncio
import codecs
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import charset_normalizer

from replug.config.errors import RunError, UserError
from replug.data.folder import read_mark, write_mark
from replug.models.score_cache import hashed
from replug.web.extraction_process import READY
from replug.web.fetching import Downloaded, Fetcher, FetchSession
from replug.web.network import FetchFailed
from replug.web.records import EngineResult

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
    return DecodedText(text, broken)


SECONDS = 20.0  # of the process's own time
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")  # no key is where pages are read


@dataclass(frozen=True, slots=True)
class MainText:
    """`published` is the date of its last change (ISO) that a page's markup gives, None where it gives none."""

    text: str
    title: str
    published: str | None


class Extractor:
    """Safe among threads, which wait for each other. The process starts with the first page, and `close` ends it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def extract(self, html: str) -> MainText:
        """Raises FetchFailed for a page that ends the process, that takes too long, or that has no text."""
        today = datetime.now(UTC).date().isoformat()
        with self._lock:
            process = self._started()
            line = self._exchange(process, json.dumps({"html": html, "today": today, "seconds": self._seconds}))
            if not line:
                raise FetchFailed(self._end_of(process))
        found = MainText(**json.loads(line))
        if not found.text.strip():
            raise FetchFailed("no_text")
        return found

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", "replug.web.extraction_process"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="ascii",
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline().strip() != READY:
                self._end(self._process)
                raise RunError("the process that reads pages did not start; its own error stands above")
        return self._process

    def _exchange(self, process: subprocess.Popen[str], line: str) -> str:
        """An empty line where the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _end_of(self, process: subprocess.Popen[str]) -> str:
        """The reason why a process has ended that should not."""
        code = process.wait()
        self._end(process)
        return "extraction_timeout" if code == -signal.SIGPROF else "extraction_failed"

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._process = None


KEY_BYTES = 16
BUDGET = "requests.json"


@dataclass(frozen=True, slots=True)
class KeptPage:
    """What became of a URL on a date (ISO). `failure` is the reason why it gave nothing, None where it has a text.

    `published` is the date of its last change that it gives itself; `broken` counts characters that could not be read.
    """

    url: str
    fetched: str
    final_url: str = ""
    title: str = ""
    text: str = ""
    published: str | None = None
    broken: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class KeptSearch:
    """What an engine answered on a date (ISO); `refusal` is the reason why it did not."""

    engine: str
    query: str
    num_results: int
    asked: str
    results: tuple[EngineResult, ...] = ()
    refusal: str | None = None


class Snapshot:
    """The folder, made when the first entry is written. Reading raises UserError for an entry that is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def page(self, url: str) -> KeptPage | None:
        found = self._read(("pages", "failed_pages"), {"url": url})
        return None if found is None else KeptPage(**found)

    def keep_page(self, page: KeptPage) -> None:
        self._write("failed_pages" if page.failure else "pages", {"url": page.url}, asdict(page))

    def search(self, engine: str, query: str, num_results: int) -> KeptSearch | None:
        asked = {"engine": engine, "query": query, "num_results": num_results}
        found = self._read(("searches", "refused_searches"), asked)
        if found is None:
            return None
        results = tuple(EngineResult(**result) for result in found.pop("results"))
        return KeptSearch(**found, results=results)

    def keep_search(self, search: KeptSearch) -> None:
        asked = {"engine": search.engine, "query": search.query, "num_results": search.num_results}
        self._write("refused_searches" if search.refusal else "searches", asked, asdict(search))

    def _path(self, kind: str, asked: dict[str, Any]) -> Path:
        name = hashed(*(f"{name}={value}" for name, value in asked.items()), size=KEY_BYTES).hex()
        return self.folder / kind / name[:2] / f"{name}.json"

    def _read(self, kinds: tuple[str, ...], asked: dict[str, Any]) -> dict[str, Any] | None:
        for path in (self._path(kind, asked) for kind in kinds):
            if path.exists():
                mend = "bring the snapshot back, or remove the file to ask again, which makes it another snapshot"
                entry = read_mark(path, mend)
                if not asked.items() <= entry.items():
                    raise UserError(f"{path} is damaged: it answers another question; {mend}")
                return entry
        return None

    def _write(self, kind: str, asked: dict[str, Any], entry: dict[str, Any]) -> None:
        path = self._path(kind, asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mark(path, entry)


THREADS = 32  # a name look-up that hangs keeps one for half a minute


class PageSource(Protocol):
    """Where pages come from."""

    def read(self, urls: Sequence[str]) -> list[KeptPage]:
        """A page for each URL, in order."""
        ...

    def close(self) -> None: ...


class WebPages:
    """A `PageSource`: the snapshot, and behind it the web. Every page is kept as soon as it is there."""

    def __init__(self, fetcher: Fetcher, extractor: Extractor, snapshot: Snapshot) -> None:
        self._fetcher, self._extractor, self._snapshot = fetcher, extractor, snapshot

    def read(self, urls: Sequence[str]) -> list[KeptPage]:
        known = {url: self._snapshot.page(url) for url in dict.fromkeys(urls)}
        missing = [url for url, page in known.items() if page is None]
        read = dict(zip(missing, asyncio.run(self._read_all(missing)) if missing else (), strict=True))
        return [known[url] or read[url] for url in urls]

    def close(self) -> None:
        self._extractor.close()

    async def _read_all(self, urls: Sequence[str]) -> list[KeptPage]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        extracting = asyncio.Lock()  # waits here and not in a thread, which name look-ups want
        async with self._fetcher.session() as session:
            return await asyncio.gather(*(self._read(session, url, extracting) for url in urls))

    async def _read(self, session: FetchSession, url: str, extracting: asyncio.Lock) -> KeptPage:
        page = KeptPage(url=url, fetched=datetime.now(UTC).date().isoformat())
        try:
            downloaded = await session.fetch(url)
            async with extracting:
                page = await asyncio.to_thread(self._with_text, page, downloaded)
        except FetchFailed as failure:
            page = replace(page, failure=failure.reason)
        self._snapshot.keep_page(page)
        return page

    def _with_text(self, page: KeptPage, downloaded: Downloaded) -> KeptPage:
        decoded = decode_page(downloaded.body, downloaded.content_type)
        is_plain = downloaded.content_type.lower().startswith("text/plain")
        found = _plain(decoded.text) if is_plain else self._extractor.extract(decoded.text)
        return replace(
            page,
            final_url=downloaded.url,
            title=" ".join(found.title.split()),
            text=found.text,
            published=found.published,
            broken=decoded.broken,
        )


def _plain(text: str) -> MainText:
    if not text.strip():
        raise FetchFailed("no_text")
    return MainText(text, "", None)
