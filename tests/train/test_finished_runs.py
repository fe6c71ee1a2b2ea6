"""A finished run shows its own table only to the configuration that made it, and goes on where more steps are asked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.models.build import lm_source
from replug.models.encoder import Encoder
from replug.train.run import train
from replug.train.run_dir import RunDirectory
from tests.support.command_line import BASE, ROOT, STEPS, CommandLine, arguments
from tests.support.runs import metrics


def config_of(run: Path, *overrides: str):
    return load_config(ROOT / "configs/debug.yaml", [*BASE, f"run_dir={run}", *overrides])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=7", "seed is 7, but the finished run in"),
        ("train.lr=0.5", "train.lr is 0.5, but the finished run in"),
        ("data.context_tokens=12", "data.context_tokens is 12"),
        ("lm.separator=x", "lm.separator is x"),
        (f"train.max_steps={STEPS - 1}", f"train.max_steps is {STEPS - 1}, but the finished run"),
    ],
)
def test_a_finished_run_of_other_keys_is_not_shown_as_this_one(
    quiet_run: Path, replug: CommandLine, override: str, says: str
) -> None:
    ended = replug(*arguments(quiet_run, (override,), "train", "debug"))
    assert ended.status == 2
    assert says in ended.errors
    assert "give another run_dir" in ended.errors
    assert "bits per byte" not in ended.output


def test_an_unfinished_run_of_other_keys_does_not_go_on(quiet_run: Path, tmp_path: Path, replug: CommandLine) -> None:
    text = (quiet_run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(str(quiet_run), str(tmp_path)))
    ended = replug(*arguments(tmp_path, ("loss.beta=0.7",), "train", "debug"))
    assert ended.status == 2
    assert ended.errors.splitlines()[-1].startswith("replug: loss.beta is 0.7, but the unfinished run in")


def test_the_same_command_shows_the_finished_run(quiet_run: Path, finish: Callable[..., str]) -> None:
    assert "holds a finished run; give another run_dir to train again, or more train.max_steps" in finish(quiet_run)


def test_the_table_and_the_report_say_which_weights_they_are_of(quiet_run: Path, finish: Callable[..., str]) -> None:
    best = json.loads((quiet_run / "best.json").read_text())
    results = json.loads((quiet_run / "results.json").read_text())
    assert results["weights"] == {"last": {"step": STEPS}, "best": best}
    said = f"REPLUG LSR (tuned): the weights of step {STEPS}, the last, in retriever/"
    assert said in " ".join(finish(quiet_run).split())
    assert said in (quiet_run / "report.html").read_text()


def test_better_weights_are_named_and_exported(quiet_run: Path, tmp_path: Path, replug: CommandLine) -> None:
    step = json.loads((quiet_run / "best.json").read_text())["step"]
    last, best = (
        replug("export", quiet_run, "--out", tmp_path / name, *more) for name, *more in (["last"], ["best", "--best"])
    )
    assert f"(weights of step {STEPS}, the last)" in last.output
    assert f"the weights of step {step} did best" in last.errors
    assert f"(weights of step {step}, the best on held-out text while training)" in best.output
    folders = (tmp_path / "last", quiet_run / "retriever", tmp_path / "best", quiet_run / "best")
    vectors = [Encoder(str(folder)).encode(["some words"]).tolist() for folder in folders]
    assert vectors[0] == vectors[1] != vectors[2] == vectors[3]


def test_best_weights_that_were_not_measured_are_not_exported(quiet_run: Path, tmp_path: Path, replug: CommandLine):
    run = copied(quiet_run, tmp_path / "run")
    for of_best in ("best.json", "checksums.json"):  # as they are where nothing was measured
        (run / of_best).unlink()
    ended = replug("export", run, "--out", tmp_path / "out", "--best")
    assert ended.status == 2
    assert "has measured no weights on held-out text" in ended.errors


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def test_a_finished_run_of_another_lm_or_set_is_not_shown_as_this_one(quiet_run: Path, tmp_path: Path) -> None:
    run = copied(quiet_run, tmp_path / "run")
    (run / "lm.json").write_text(json.dumps({"identity": "other"}))
    with pytest.raises(UserError, match=r"lm: the run in .* was begun with another LM"):
        train(config_of(run))
    shutil.copy(quiet_run / "lm.json", run)
    (run / "set.json").write_text(json.dumps({"manifest_sha256": "other"}))
    with pytest.raises(UserError, match=r"data: the run in .* was begun with another prepared set"):
        train(config_of(run))


def test_a_finished_run_keeps_one_checkpoint_and_the_versions_it_needs(quiet_run: Path) -> None:
    run = RunDirectory(quiet_run)
    [mark] = run.checkpoint_marks()
    assert mark.step == STEPS
    assert all((run.index / f"v{version:06d}" / "manifest.json").is_file() for version in mark.versions)


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_steps(quiet_run: Path, tmp_path: Path, finish: Callable[..., str]) -> None:
    run = copied(quiet_run, tmp_path / "run")
    printed = finish(run, f"train.max_steps={STEPS + 6}")
    assert f"from step {STEPS} on the learning rate is that of a run of {STEPS + 6} steps" in printed
    assert f"resuming at step {STEPS}" in printed
    assert [row["step"] for row in metrics(run)] == list(range(STEPS + 6))
    assert metrics(run)[:STEPS] == metrics(quiet_run)
    before, after = (json.loads((path / "results.json").read_text()) for path in (quiet_run, run))
    assert before["bpb"]["all"]["replug"] == after["bpb"]["all"]["replug"]
    assert before["bpb"]["all"]["lsr"] != after["bpb"]["all"]["lsr"]
    assert load_config(run / "config.yaml").train.max_steps == STEPS + 6


def test_a_finished_run_without_a_checkpoint_cannot_go_on(quiet_run: Path, tmp_path: Path) -> None:
    run = copied(quiet_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    config = config_of(run, f"train.max_steps={STEPS + 6}")
    source = lm_source(config.lm, tmp_path / "spent", tmp_path / "scores")
    with pytest.raises(UserError, match="kept no checkpoint to go on from: give another run_dir"):
        RunDirectory(run).claim(config, source.identity, run / "data")
    assert (run / "results.json").is_file()


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_run_dir_that_cannot_be_one_is_named_before_anything_starts(
    tmp_path: Path, replug: CommandLine, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    ended = replug("train", ROOT / "configs/debug.yaml", f"run_dir={tmp_path / place}")
    assert (ended.status, ended.errors) == (
        2,
        f"replug: run_dir: {tmp_path / 'file'} is a file; expected a folder, or a name that is free\n",
    )


def test_a_foreign_run_dir_is_refused_before_anything_is_written_into_it(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    ended = replug("train", ROOT / "configs/debug.yaml", f"run_dir={tmp_path}")
    assert ended.status == 2
    assert "holds thesis.tex, which is of no run; give another run_dir" in ended.errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
