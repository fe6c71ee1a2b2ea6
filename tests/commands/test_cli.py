"""The command line shows its commands in groups, and starts without heavy imports."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_shows_the_commands_in_groups_the_main_ones_first() -> None:
    printed = run(ROOT / "python", "-m", "replug.commands.cli", "--help")
    named = re.findall(r"^(?:╭─ (?!Options)([\w ]+?) ─|│ ([a-z]+) )", printed, re.MULTILINE)
    assert [group or command for group, command in named] == [
        *("Train", "train", "prepare", "slurm"),
        *("Evaluate", "evaluate", "report"),
        *("Use", "search", "ask", "export", "serve"),
        *("Plan and check", "plan", "doctor", "keys"),
    ]


def test_no_command_imports_what_is_heavy_before_it_runs() -> None:
    code = (
        "import sys; from replug.commands.cli import command_line; command_line();"
        "heavy = {'torch', 'sentence_transformers', 'ray', 'faiss', 'transformers', 'datasets', 'scipy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(ROOT / "python", "-c", code) == "[]\n"
