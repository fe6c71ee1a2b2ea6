"""From URLs to pages that have a text: fetched, decoded, stripped of menus, kept. Each URL is tried once a snapshot."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from replug.web.charset import decode_page
from replug.web.extraction import Extractor, MainText
from replug.web.fetch_failure import FetchFailed
from replug.web.fetching import Downloaded, Fetcher, FetchSession
from replug.web.snapshot import KeptPage, Snapshot

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
