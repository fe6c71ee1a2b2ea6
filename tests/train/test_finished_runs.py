"""A finished run shows its own table only to the configuration that made it; its code and its loggers."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import replug as package
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.folder import read_mark, write_mark
from replug.train import run_dir
from replug.train.report import write_report
from replug.train.run import train
from replug.train.run_dir import RunDirectory, describe_environment, provenance_lines
from replug.train.step_metrics import has_wandb_key
from tests.support.command_line import BASE, ROOT, STEPS, CommandLine, arguments


def config_of(run: Path, *overrides: str):
    return load_config(ROOT / "configs/debug.yaml", [*BASE, f"run_dir={run}", *overrides])


@pytest.fixture
def copied(quiet_run: Path, tmp_path: Path) -> RunDirectory:
    """A copy of the finished run, to change."""
    return RunDirectory(Path(shutil.copytree(quiet_run, tmp_path / "run", symlinks=True)))


@pytest.mark.parametrize("override", ["seed=7", f"train.max_steps={STEPS + 6}"])
def test_a_run_of_other_keys_is_neither_shown_nor_resumed(
    quiet_run: Path, tmp_path: Path, replug: CommandLine, override: str
) -> None:
    for name in ("config.yaml", "inputs.json", "metrics.jsonl"):
        shutil.copy(quiet_run / name, tmp_path)
    changed = override.replace("=", " is ")
    for run, expected in ((quiet_run, f"{changed}, but the run in"), (tmp_path, f"{changed}, but the unfinished run")):
        ended = replug(*arguments(run, (override,), "train", "debug"))
        assert ended.status == 2 and expected in ended.errors and "bits per byte" not in ended.output


def test_a_run_with_its_own_labels_is_not_shown_for_other_candidates(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    made, other = (config_of(tmp_path, "train.labels=auto", f"label.dense={dense}") for dense in (4, 5))
    run.folder.claim(run_dir._inputs_of(made))
    run.require_config(made)
    with pytest.raises(UserError, match=r"label.dense is 5, but the unfinished run in .* was made with 4"):
        run.require_config(other)


def test_the_report_keeps_the_picture_of_its_run_whatever_is_measured_again(copied: RunDirectory) -> None:
    picture = json.loads(copied.document_weights.read_text())
    other = picture | {"id": "another text"}  # as `replug evaluate` leaves it
    (copied.evaluation / "language_modelling/document_weights.json").write_text(json.dumps(other))
    write_report(copied)
    assert f"on text {picture['id']}," in copied.report.read_text()
    assert "another text" not in copied.report.read_text()


def test_a_finished_run_of_another_lm_or_set_is_not_shown_as_this_one(copied: RunDirectory) -> None:
    content = read_mark(copied.path / "inputs.json", "")
    for name in ("lm.identity", "data.sha256"):
        write_mark(copied.path / "inputs.json", {**content, "inputs": {**content["inputs"], name: "other"}})
        with pytest.raises(UserError, match=rf"{name} is .*, but the run in .* was made with 'other'"):
            train(config_of(copied.path))


def test_a_run_dir_that_is_a_file_or_holds_others_files_is_refused_before_anything_is_written(
    tmp_path: Path, replug: CommandLine
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for run, expected in ((tmp_path / "thesis.tex/run", "is a file"), (tmp_path, "holds thesis.tex, which is not")):
        ended = replug("train", "debug", f"run_dir={run}")
        assert ended.status == 2 and expected in ended.errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_commit_of_a_repository_that_only_holds_the_environment_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    own = tmp_path / ".venv/lib/run_dir.py"
    own.parent.mkdir(parents=True)
    own.write_text("")
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "The user's own work")
    monkeypatch.setattr(run_dir, "THIS_FILE", own)
    environment = describe_environment()
    assert environment["git_commit"] is None and environment["git_dirty"] is False
    line = provenance_lines(load_config(ROOT / "configs/debug.yaml", []), environment, None)[-1]
    assert f"code: replug {package.__version__}, torch" in line
    git("add", ".")
    git("commit", "-q", "-m", "Take replug in")
    environment = describe_environment()
    assert environment["git_commit"] == git("rev-parse", "HEAD") and environment["git_dirty"] is False


def test_wandb_is_refused_by_name_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replug.config.errors.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb\.mode=offline needs wandb: pip install 'replug\[wandb\]'"):
        train(config_of(tmp_path / "run", "wandb.mode=offline"))
    with pytest.raises(UserError, match=r"loggers=\[mlflow\] needs mlflow: pip install 'replug\[mlflow\]'"):
        train(config_of(tmp_path / "run", "loggers=[mlflow]"))
    assert not (tmp_path / "run").exists()


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
