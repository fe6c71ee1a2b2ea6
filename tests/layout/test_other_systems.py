"""Parts of Linux that macOS has not: each is taken away here, and what stands for it gives the same."""

import os
import sys
from pathlib import Path

import pytest

from replug.commands.checks import machine
from replug.data.files import as_other_files
from replug.models.hardware import available_cores, available_memory
from replug.train.run_dir import describe_environment

GIB = 2**30


def test_without_an_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == describe_environment()["cores"] == os.cpu_count()


def test_without_proc_memory_and_permissions_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = Path.read_text

    def read(path: Path, *arguments: str, **options: str) -> str:
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(path)
        return known(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    assert GIB / 8 < available_memory() < 2**50
    (tmp_path / "model/inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "model/inner/weights").touch(mode=0o600)
    before = os.umask(0o027)
    try:
        as_other_files(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"model": 0o750, "inner": 0o750, "weights": 0o640}


def test_shared_memory_is_asked_for_on_linux_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert machine.shared_memory() is not None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.shared_memory() is None
