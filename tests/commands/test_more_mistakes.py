"""Mistakes of newcomers and careless users, each through the command line as it is typed: one line, and which it is."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, CommandLine

CONFIG = "run_dir: {run}\nretriever: {{path: stand_in}}\nlm: {{path: stand_in}}\ndata: {{source: stand_in}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(CONFIG.format(run=tmp_path / "run"))
    return path


# What is typed after `replug`; {config} and {tmp} are filled in. Status 2, and one line that holds the text.
TYPED = [
    # names of keys
    ("train {config} train.learning_rate=1e-4", "train.learning_rate: unknown key; `replug keys` lists them all"),
    ("keys zzz", "no key begins with 'zzz'; `replug keys` lists them all"),
    # configurations
    ("train {tmp}", "configuration {tmp} is a folder; expected a YAML file"),
    ("train {config} --max-steps 5", "--max-steps is a key of the configuration; expected train.max_steps=VALUE"),
    # folders and files
    ("train {config} run_dir={config}", "run_dir: {config} is a file; expected a folder, or a name that is free"),
    ("export {tmp} --out {config}", "--out: {config} is a file; expected a folder"),
    ("doctor {tmp}/no", "does not exist; expected a YAML file, an index"),
    ("doctor {tmp}", "holds nothing that replug wrote"),
    ("prepare {config} --sentence-transformers {tmp}/f", "--sentence-transformers writes labels in another form"),
    # models
    ("train {config} lm.path={tmp}/no", "lm.path: {tmp}/no does not exist"),
    # data
    ("prepare {config} lm.path=null", "lm.path is missing: data.tokenizer is lm, so texts are cut by the LM's tokens"),
    # pictures, plans
    # SLURM
    ("slurm {config} --job tran", "--job: expected one of train, prepare, evaluate"),
]


@pytest.mark.parametrize(("typed", "says"), TYPED, ids=[typed for typed, _ in TYPED])
def test_a_mistake_ends_in_one_line(config: Path, tmp_path: Path, replug: CommandLine, typed: str, says: str) -> None:
    filled = [text.format(config=config, tmp=tmp_path) for text in typed.split()]
    ended = replug(*filled)
    assert ended.status == 2, ended.printed
    assert says.format(config=config, tmp=tmp_path) in ended.errors
    assert "Traceback" not in ended.errors
    told = [line for line in ended.errors.splitlines() if line.startswith("replug: ")]
    assert len(told) == 1 and ("No such option" in ended.errors or told == [ended.errors.strip()])


def test_a_home_that_cannot_be_written_is_named_with_the_variable_to_set(
    config: Path, tmp_path: Path, replug: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLUG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file/home"))
    ended = replug("train", config)
    told = ended.errors.splitlines()[-1]
    assert told.startswith(f"replug: {tmp_path}/file/home") and "set REPLUG_CACHE" in told


def test_a_split_that_falls_short_is_said(tmp_path: Path, replug: CommandLine) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [{"id": str(i), "text": " ".join(f"word{i} {j}" for j in range(80))} for i in range(40)]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [f"data.source={texts}", "data.num_queries=100000", "lm.path=stand_in", "data.context_tokens=8"]
    ended = replug("prepare", ROOT / "configs/own_data.yaml", *given, f"run_dir={tmp_path / 'run'}")
    assert ended.status == 0, ended.errors
    assert "data.num_queries is 100,000, and the source gives " in ended.errors


@pytest.mark.parametrize("content", [b"", b"x", b"{}\n", b"a note to myself"])
def test_a_foreign_file_is_not_made_a_cache(tmp_path: Path, replug: CommandLine, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    assert replug("doctor", path).status == 2
    assert path.read_bytes() == content


def test_the_version_and_short_options_are_there(replug: CommandLine) -> None:
    assert replug("--version").output.startswith("replug 0.")
    assert "--install-completion" in replug("--help").output
    assert replug("train", "-h").status == 0


def test_ctrl_c_ends_a_command_with_a_line_and_status_130(replug: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("replug.config.keys.key_descriptions", pressed)
    ended = replug("keys")
    assert (ended.status, ended.errors.count("interrupted by Ctrl-C")) == (130, 1)
    assert signal.getsignal(signal.SIGINT) is before


OF_THE_SYSTEM: list[tuple[type[OSError], int, str]] = [
    (PermissionError, 13, "Permission denied"),
]


@pytest.mark.parametrize(("kind", "number", "says"), OF_THE_SYSTEM)
def test_what_the_file_system_refuses_is_one_line(
    replug: CommandLine, monkeypatch: pytest.MonkeyPatch, kind: type[OSError], number: int, says: str
) -> None:
    monkeypatch.setattr("replug.config.keys.key_descriptions", _raiser(kind(number, says, "/mnt/run/x")))
    ended = replug("keys")
    assert (ended.status, ended.errors) == (1, f"replug: /mnt/run/x: {says}\n")


def test_other_errors_of_the_system_keep_their_traceback(replug: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replug.config.keys.key_descriptions", _raiser(OSError("no file is named")))
    with pytest.raises(OSError, match="no file is named"):
        replug("keys")


def _raiser(error: OSError) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act
