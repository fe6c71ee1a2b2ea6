"""What is kept comes back as it was, and what is damaged is refused by its name."""

from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.web.pages import KeptPage, KeptSearch, Snapshot
from replug.web.records import EngineResult

PAGE = KeptPage("https://a.test/", "2024-05-01", "https://a.test/x", "Title", "Größe \ud800 \n text", "2020-01-01", 1)
SEARCH = KeptSearch("engine", "who?", 20, "2024-05-01", (EngineResult("https://a.test/", "A", 1, text="t"),))


def only_file(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


def test_pages_and_searches_come_back_as_they_were(tmp_path: Path) -> None:
    Snapshot(tmp_path).keep_page(PAGE)
    Snapshot(tmp_path).keep_search(SEARCH)
    assert Snapshot(tmp_path).page(PAGE.url) == PAGE
    assert Snapshot(tmp_path).search("engine", "who?", 20) == SEARCH
    assert Snapshot(tmp_path).page("https://b.test/") is None
    assert Snapshot(tmp_path).search("engine", "who?", 10) is None
    assert Snapshot(tmp_path).search("other", "who?", 20) is None


def test_failures_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    Snapshot(tmp_path).keep_page(KeptPage("https://a.test/", "2024-05-01", failure="timeout"))
    Snapshot(tmp_path).keep_search(replace(SEARCH, results=(), refusal="rate_limited"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed_pages", "refused_searches"]
    page, search = Snapshot(tmp_path).page("https://a.test/"), Snapshot(tmp_path).search("engine", "who?", 20)
    assert page is not None and search is not None
    assert (page.failure, search.refusal) == ("timeout", "rate_limited")


def test_a_flipped_bit_is_refused_by_name_wherever_it_is(tmp_path: Path) -> None:
    Snapshot(tmp_path).keep_page(PAGE)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=path.name):
            Snapshot(tmp_path).page(PAGE.url)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"sha256": 1, "entry": 2}', b"\xff"])
def test_what_is_no_entry_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    Snapshot(tmp_path).keep_page(PAGE)
    only_file(tmp_path).write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        Snapshot(tmp_path).page(PAGE.url)


def test_an_entry_of_another_page_is_refused(tmp_path: Path) -> None:
    Snapshot(tmp_path / "a").keep_page(PAGE)
    Snapshot(tmp_path / "b").keep_page(replace(PAGE, url="https://b.test/"))
    only_file(tmp_path / "a").write_bytes(only_file(tmp_path / "b").read_bytes())
    with pytest.raises(UserError, match="is damaged"):
        Snapshot(tmp_path / "a").page(PAGE.url)


def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    Snapshot(tmp_path).keep_page(PAGE)
    path = only_file(tmp_path)
    path.rename(path.with_name(path.name + ".partial"))
    assert Snapshot(tmp_path).page(PAGE.url) is None
