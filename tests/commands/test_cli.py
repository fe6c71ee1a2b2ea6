"""The command line finds its commands by listing a folder, in groups, and starts without what is heavy."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELLO = '''
"""`replug hello`."""

from replug.commands.command import Command, Group


def hello(name: str) -> None:
    """Greet."""
    print(f"hello {name}")


COMMAND = Command(hello, Group.use, place=9)
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with one file more."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "replug", folder / "replug", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "replug/commands/hello.py").write_text(HELLO)
    return folder


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_is_one_file(checkout: Path) -> None:
    assert run(checkout, "-m", "replug.commands.cli", "hello", "Ray") == "hello Ray\n"


def test_help_shows_the_commands_in_groups_the_main_ones_first(checkout: Path) -> None:
    printed = run(checkout, "-m", "replug.commands.cli", "--help")
    named = re.findall(r"^(?:╭─ (?!Options)([\w ]+?) ─|│ ([a-z]+) )", printed, re.MULTILINE)
    assert [group or command for group, command in named] == [
        *("Prepare", "prepare", "index", "example", "label", "Train", "train", "slurm"),
        *("Evaluate", "evaluate", "report", "adapt"),
        *("Use", "search", "ask", "export", "serve", "hello"),
        *("Look and plan", "plan", "doctor", "verify", "keys"),
    ]


def test_no_command_imports_what_is_heavy_before_it_runs(checkout: Path) -> None:
    code = (
        "import sys; from replug.commands.cli import command_line; command_line();"
        "print(sorted({'torch', 'ray', 'faiss', 'transformers', 'datasets', 'scipy'} & set(sys.modules)))"
    )
    assert run(checkout, "-c", code) == "[]\n"
