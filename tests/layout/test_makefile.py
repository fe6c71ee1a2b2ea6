"""`make install` and `make test` on a Python and a pip of the test's own: what is installed, and what goes."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.packages import ROOT

TORCH = "torch==2.13.0"
OLD_DRIVER = "torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
PYTHON = """#!/bin/sh
[ "$1" = -m ] && { mkdir -p .venv/bin; cp pip .venv/bin/pip; cp python .venv/bin/python; }
exit 0
"""
# Keeps one file for each distribution, as a real one keeps a folder.
PIP = """#!/bin/sh
command=$1; shift
for word in "$@"; do case $word in
  *.\\[*gpu*) [ $command = install ] && touch .venv/faiss-gpu ;;
  *.\\[*cpu*) [ $command = install ] && touch .venv/faiss-cpu ;;
  torch==*) echo "$*" > .venv/torch ;;
  faiss-*|torch)
    [ $command = show ] && { [ -e .venv/$word ]; exit; }
    [ $command = uninstall ] && rm -f .venv/$word ;;
esac; done
echo "$command" >> .venv/calls
"""


@pytest.fixture
def make(tmp_path):
    """Runs make on a copy of the Makefile; returns how often pip was called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in (("python", PYTHON), ("pip", PIP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments: str) -> int:
        (tmp_path / ".venv").mkdir(exist_ok=True)
        (tmp_path / ".venv/calls").write_text("")
        command = ["make", *arguments, f"PYTHON={tmp_path / 'python'}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return len((tmp_path / ".venv/calls").read_text().splitlines())

    return run


def faiss(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".venv").glob("faiss-*"))


def torch(folder: Path) -> str:
    return (folder / ".venv/torch").read_text().strip().partition("constraints.txt ")[2]


def test_faiss_of_the_other_flavour_takes_the_place_of_the_first(make, tmp_path):
    make("install")
    assert faiss(tmp_path) == ["faiss-cpu"]
    make("install", "FAISS=gpu")
    assert faiss(tmp_path) == ["faiss-gpu"]
    make("install", "FAISS=cpu")
    assert faiss(tmp_path) == ["faiss-cpu"]


def test_the_tests_keep_the_flavour_that_was_installed(make, tmp_path):
    make("install", "FAISS=gpu")
    make("test")
    assert faiss(tmp_path) == ["faiss-gpu"]


def test_another_torch_takes_the_place_of_the_first_and_holds(make, tmp_path):
    make("install", "FAISS=gpu")
    assert torch(tmp_path) == TORCH
    make("install", f"TORCH={OLD_DRIVER}")
    assert torch(tmp_path) == OLD_DRIVER and faiss(tmp_path) == ["faiss-gpu"]
    make("test")
    assert torch(tmp_path) == OLD_DRIVER


def test_what_is_installed_is_not_installed_again(make, tmp_path):
    make("install", f"TORCH={OLD_DRIVER}", "FAISS=gpu")
    assert make("install") == 0
    assert make("install", f"TORCH={OLD_DRIVER}", "FAISS=gpu") == 0


def test_two_faiss_that_are_there_become_one(make, tmp_path):
    make("install")
    (tmp_path / ".venv/faiss-gpu").touch()  # by hand, beside it
    os.utime(tmp_path / "constraints.txt", (time.time() + 5,) * 2)  # newer, however coarse the clock of files is
    make("install")
    assert faiss(tmp_path) == ["faiss-cpu"]


def test_a_flavour_that_there_is_none_of_is_refused(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(["make", "install", "FAISS=cuda"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "FAISS is cuda; expected cpu or gpu" in done.stderr
