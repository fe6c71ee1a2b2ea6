"""Machines and accounts as they are: other settings, homes, terminals and folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.files import as_other_files
from replug.models.hardware import available_cores
from replug.train.step_metrics import has_wandb_key
from tests.support.command_line import CommandLine, clean_environment


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


def test_an_online_run_without_a_login_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replug: CommandLine
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    ended = replug("train", "debug", "wandb.mode=online", f"run_dir={tmp_path / 'run'}")
    assert ended.status == 2 and "wandb.mode is online, and W&B has no key; run `wandb login`" in ended.errors
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password secret\n")
    assert has_wandb_key()


def run_here(folder: Path, *typed: object, **environment: str) -> subprocess.CompletedProcess:
    """The installed command as it is typed in a folder."""
    command = [str(Path(sys.executable).with_name("replug")), *map(str, typed)]
    given = {**clean_environment(), **environment}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, timeout=300)


def test_a_terminal_without_the_signs_shows_others_and_a_home_that_is_missing_is_one_line(tmp_path: Path) -> None:
    ended = run_here(tmp_path, "doctor", PYTHONIOENCODING="latin-1")
    assert ended.returncode == 0 and b" CUDA " in ended.stdout, ended.stderr
    keys = ["lm.path=package:smollm2", "retriever.path=stand_in", "data.tokenizer=lm", "data.out=out"]
    (tmp_path / "docs").mkdir()
    for number in range(12):
        (tmp_path / f"docs/{number}.txt").write_text(" ".join(f"w{number}x{i}" for i in range(900)))
    ended = run_here(tmp_path, "prepare", "own_data", "data.source=docs", *keys, HOME="/proc/nohome")
    line = "replug: /proc/nohome: No such file or directory; set REPLUG_CACHE to a folder that can be written\n"
    assert (ended.returncode, ended.stderr.decode()) == (1, line)
