"""A run records its code: the version always, a commit only of a repository that tracks this code."""

import subprocess
from pathlib import Path

import pytest

import replug
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.train import run_dir
from replug.train.run import train
from replug.train.run_dir import describe_environment, provenance_lines
from tests.support.command_line import ROOT


def test_the_commit_of_a_repository_that_only_holds_the_environment_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    own = tmp_path / ".venv/lib/run_dir.py"
    own.parent.mkdir(parents=True)
    own.write_text("")
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "The user's own work")
    monkeypatch.setattr(run_dir, "THIS_FILE", own)
    environment = describe_environment()
    assert environment["git_commit"] is None and environment["git_dirty"] is False
    assert environment["packages"]["replug"] == replug.__version__
    config = load_config(ROOT / "configs/debug.yaml", [])
    assert f"code: replug {replug.__version__}, torch" in provenance_lines(config, environment, None)[-1]
    git("add", ".")
    git("commit", "-q", "-m", "Take replug in")
    environment = describe_environment()
    assert environment["git_commit"] == git("rev-parse", "HEAD") and environment["git_dirty"] is False


def test_wandb_is_refused_by_name_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replug.config.errors.importlib.util.find_spec", lambda name: None)
    config = load_config(ROOT / "configs/debug.yaml", [f"run_dir={tmp_path / 'run'}", "wandb.mode=offline"])
    with pytest.raises(UserError, match=r"wandb\.mode=offline needs wandb: pip install 'replug\[wandb\]'"):
        train(config)
    assert not (tmp_path / "run").exists()
