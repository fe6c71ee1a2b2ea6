"""Engines' answers and pages as they were when they were requested, each once a snapshot.

SNAPSHOT/searches/          what an engine answered to a query
SNAPSHOT/refused_searches/  why it did not; remove the folder to ask again
SNAPSHOT/pages/             main text, title, final URL, date; not the HTML
SNAPSHOT/failed_pages/      why a page gave nothing; remove the folder to try these again
SNAPSHOT/requests.json      the budget: requests to engines so far

An entry is a file with its own checksum, named by a hash of its request and renamed when it is whole. An entry
that is damaged, or answers something else, is refused by its name: replacing it would make another snapshot. One
process at a time writes to a folder.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.folder import read_mark, write_mark
from replug.models.score_cache import hashed
from replug.web.extraction import Extractor, FetchFailed, decode_page
from replug.web.fetch import Downloaded, Fetcher
from replug.web.records import EngineResult

KEY_BYTES = 16
RESULT_FIELDS = [field.name for field in fields(EngineResult)]
BUDGET = "requests.json"
THREADS = 32  # a name look-up that hangs keeps one for half a minute


@dataclass(frozen=True, slots=True)
class KeptPage:
    """A page as it was on a date (ISO). `failure` is the reason why it gave nothing, None if it has a text.

    `broken` counts characters that could not be read.
    """

    url: str
    fetched: str
    final_url: str = ""
    title: str = ""
    text: str = ""
    broken: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class KeptSearch:
    """An engine's answer on a date (ISO); `refusal` is the reason why it did not answer."""

    engine: str
    query: str
    num_results: int
    asked: str
    results: tuple[EngineResult, ...] = ()
    refusal: str | None = None


class Snapshot:
    """The folder, made when the first entry is written. Reading raises UserError for a damaged entry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def page(self, url: str) -> KeptPage | None:
        entry = self._read(("pages", "failed_pages"), {"url": url})
        return None if entry is None else KeptPage(**entry)

    def keep_page(self, page: KeptPage) -> None:
        self._write("failed_pages" if page.failure else "pages", {"url": page.url}, asdict(page))

    def search(self, engine: str, query: str, num_results: int) -> KeptSearch | None:
        request = {"engine": engine, "query": query, "num_results": num_results}
        entry = self._read(("searches", "refused_searches"), request)
        if entry is None:
            return None
        results = tuple(EngineResult(*(row[name] for name in RESULT_FIELDS)) for row in entry.pop("results"))
        return KeptSearch(**entry, results=results)

    def keep_search(self, search: KeptSearch) -> None:
        request = {"engine": search.engine, "query": search.query, "num_results": search.num_results}
        self._write("refused_searches" if search.refusal else "searches", request, asdict(search))

    def _path(self, kind: str, request: dict[str, Any]) -> Path:
        name = hashed(*(f"{name}={value}" for name, value in request.items()), size=KEY_BYTES).hex()
        return self.folder / kind / name[:2] / f"{name}.json"

    def _read(self, kinds: tuple[str, ...], request: dict[str, Any]) -> dict[str, Any] | None:
        for path in (self._path(kind, request) for kind in kinds):
            if path.exists():
                fix_hint = "bring the snapshot back, or remove the file to ask again, which makes it another snapshot"
                entry = read_mark(path, fix_hint)
                if not request.items() <= entry.items():
                    raise UserError(f"{path} is damaged: it answers another question; {fix_hint}")
                return entry
        return None

    def _write(self, kind: str, request: dict[str, Any], entry: dict[str, Any]) -> None:
        path = self._path(kind, request)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mark(path, entry)


class WebPages:
    """Read pages from the snapshot, and what is missing from the web. Every page is kept as soon as it is read."""

    def __init__(self, fetcher: Fetcher, extractor: Extractor, snapshot: Snapshot) -> None:
        self._fetcher, self._extractor, self._snapshot = fetcher, extractor, snapshot

    def read(self, urls: Sequence[str]) -> list[KeptPage]:
        """Return a page for each URL, in order."""
        pages = {url: self._snapshot.page(url) for url in urls}
        missing = [url for url, page in pages.items() if page is None]
        if missing:
            pages |= zip(missing, asyncio.run(self._read_all(missing)), strict=True)
        return [page for url in urls if (page := pages[url]) is not None]

    def close(self) -> None:
        self._extractor.close()

    async def _read_all(self, urls: Sequence[str]) -> list[KeptPage]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        extracting = asyncio.Lock()  # pages wait here and not in a thread, since name look-ups need threads
        async with self._fetcher.session():
            return await asyncio.gather(*(self._read(url, extracting) for url in urls))

    async def _read(self, url: str, extracting: asyncio.Lock) -> KeptPage:
        page = KeptPage(url=url, fetched=datetime.now(UTC).date().isoformat())
        try:
            downloaded = await self._fetcher.fetch(url)
            async with extracting:
                page = await asyncio.to_thread(self._with_text, page, downloaded)
        except FetchFailed as failure:
            page = replace(page, failure=failure.reason)
        self._snapshot.keep_page(page)
        return page

    def _with_text(self, page: KeptPage, downloaded: Downloaded) -> KeptPage:
        text, broken = decode_page(downloaded.body, downloaded.content_type)
        title = ""
        if not downloaded.content_type.lower().startswith("text/plain"):
            text, title = self._extractor.extract(text)
        elif not text.strip():
            raise FetchFailed("no_text")
        title = " ".join(title.split())
        return replace(page, final_url=downloaded.url, title=title, text=text, broken=broken)
