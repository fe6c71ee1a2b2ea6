"""The snapshot: every answer of an engine and every page, kept with its date, so that an evaluation can be repeated.

SNAPSHOT/searches/          what an engine answered to a query
SNAPSHOT/refused_searches/  why it did not; remove the folder to ask again
SNAPSHOT/pages/             main text, title, final URL, date; not the HTML
SNAPSHOT/failed_pages/      why a page gave nothing; remove the folder to try these again
SNAPSHOT/requests.json      the budget: requests to engines so far

An entry is a file, named by a hash of what was asked for, written beside and renamed: kill -9 leaves the whole of it or
none. It holds its own checksum. One that is damaged, or answers something else, is refused by its name: what replaced
it would be another snapshot. One process at a time writes to a folder.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.files import replace_file
from replug.models.score_cache import hashed
from replug.web.records import EngineResult

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
                return _checked(path, asked)
        return None

    def _write(self, kind: str, asked: dict[str, Any], entry: dict[str, Any]) -> None:
        path = self._path(kind, asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _canonical(entry)
        replace_file(path, f'{{"sha256": "{_sha256(text)}", "entry": {text}}}\n'.encode("ascii"))


def _checked(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        entry = content["entry"]
        is_sound = content["sha256"] == _sha256(_canonical(entry)) and asked.items() <= entry.items()
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise UserError(
            f"{path} is damaged: its checksum differs; bring the snapshot back, or remove the file to ask again, which "
            "makes it another snapshot"
        )
    return entry


def _canonical(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=True, sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()
