"""The command line shows its commands in groups, and starts without heavy imports."""

import re
import subprocess
import sys
from pathlib import Path

from replug.config.paths import SHIPPED, find_config
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_command_imports_what_is_heavy_before_it_runs() -> None:
    code = (
        "import sys; from replug.commands.cli import command_line; command_line();"
        "heavy = {'torch', 'sentence_transformers', 'ray', 'faiss', 'transformers', 'datasets', 'scipy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(ROOT / "python", "-c", code) == "[]\n"


def test_shipped_configurations_are_listed_and_copied(replug: CommandLine, tmp_path: Path) -> None:
    lines = replug("configs").output.splitlines()
    assert len(lines) == len(list((ROOT / "configs").rglob("*.yaml")))
    assert any(re.match(r"own_data +Your own folder", line) for line in lines)
    copied = replug("configs", "--copy", "own_data", tmp_path / "mine.yaml")
    assert copied.status == 0 and (tmp_path / "mine.yaml").read_text() == (ROOT / "configs/own_data.yaml").read_text()
    assert (
        "mine.yaml exists; give another file" in replug("configs", "--copy", "own_data", tmp_path / "mine.yaml").errors
    )
    assert "no configuration is called 'own'" in replug("configs", "--copy", "own").errors


def test_a_name_is_a_file_or_run_of_ones_own_before_a_shipped_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper").mkdir()
    assert find_config("paper") == find_config("configs/paper.yaml") == SHIPPED / "paper.yaml"
    (tmp_path / "paper/config.yaml").touch()
    assert find_config("paper") == Path("paper")
