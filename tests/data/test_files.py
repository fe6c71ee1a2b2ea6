"""Files are replaced whole, beside and renamed, and nothing that lies in the way is written through."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.files import read_json, replace_file


def test_a_link_in_the_way_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for name in ("report.html", "report.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "report.html", b"ours")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "ours" and not (tmp_path / "report.html").is_symlink()


def test_json_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm.json").write_text('{"identity": "a')
    with pytest.raises(UserError, match=r"lm\.json is damaged, it is not valid JSON .*; mend it"):
        read_json(tmp_path / "lm.json", "mend it")
