"""Machines and accounts as they are: other permissions, settings and terminals."""

import io
import os
import sys
from pathlib import Path

import pytest

from replug.commands.cli import main
from replug.config.errors import UserError
from replug.data.files import as_other_files
from replug.models.hardware import available_cores


def test_files_of_a_temporary_folder_get_the_users_permissions(tmp_path: Path) -> None:
    (tmp_path / "model/inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "model/inner/weights").touch(mode=0o600)
    before = os.umask(0o027)
    try:
        as_other_files(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"model": 0o750, "inner": 0o750, "weights": 0o640}


def test_threads_are_those_of_the_outermost_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (("4", 4), ("4,2", 4), (" 3 , 1", 3), ("", len(os.sched_getaffinity(0)))):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert available_cores() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UserError, match=r"\$OMP_NUM_THREADS is 'many'; expected a number of threads, such as 4"):
        available_cores()


def test_a_terminal_without_the_signs_shows_others(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", ["replug", "train", "debug", "日本=1"])
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the command sets it for its process
    with pytest.raises(SystemExit):
        main()
    terminal.seek(0)
    assert "??: unknown key" in terminal.read()
