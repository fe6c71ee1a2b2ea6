"""A finished run shows its own table only to the configuration that made it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.folder import read_mark, write_mark
from replug.train.run import show_results, train
from replug.train.run_dir import RunDirectory
from tests.support.command_line import BASE, ROOT, STEPS, CommandLine, arguments


def config_of(run: Path, *overrides: str):
    return load_config(ROOT / "configs/debug.yaml", [*BASE, f"run_dir={run}", *overrides])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=7", "seed is 7, but the run in"),
        (f"train.max_steps={STEPS + 6}", f"train.max_steps is {STEPS + 6}, but the run"),
    ],
)
def test_a_finished_run_of_other_keys_is_not_shown_as_this_one(
    quiet_run: Path, replug: CommandLine, override: str, says: str
) -> None:
    ended = replug(*arguments(quiet_run, (override,), "train", "debug"))
    assert ended.status == 2
    assert says in ended.errors
    assert "another run_dir" in ended.errors
    assert "bits per byte" not in ended.output


def test_a_run_with_its_own_labels_is_not_shown_for_other_candidates(quiet_run: Path, tmp_path: Path) -> None:
    run = RunDirectory(copied(quiet_run, tmp_path / "run"))
    config = config_of(run.path)
    begun = replace(config, label=replace(config.label, dense=4, bm25=2))
    with pytest.raises(
        UserError, match=r"label.dense is 20, but the labels of the run in .* were made with 4: give the"
    ):
        run.require_candidates(config, begun)
    run.require_candidates(begun, begun)


def test_an_unfinished_run_of_other_keys_does_not_go_on(quiet_run: Path, tmp_path: Path, replug: CommandLine) -> None:
    for name in ("config.yaml", "inputs.json"):
        shutil.copy(quiet_run / name, tmp_path)
    ended = replug(*arguments(tmp_path, ("loss.beta=0.7",), "train", "debug"))
    assert ended.status == 2
    assert ended.errors.splitlines()[-1].startswith("replug: loss.beta is 0.7, but the unfinished run in")


def test_the_table_and_the_report_say_which_weights_they_are_of(quiet_run: Path, finish: Callable[..., str]) -> None:
    results = json.loads((quiet_run / "results.json").read_text())
    weights = {"step": STEPS, "steps": STEPS, "first": None, "best": None, "alone": None}
    assert results["weights"] == weights == json.loads((quiet_run / "fitted.json").read_text())
    said = f"lsr: the weights of step {STEPS}, the last, in retriever/"
    printed, page = " ".join(finish(quiet_run).split()), (quiet_run / "report.html").read_text()
    verdict = results["verdict"]
    assert said in printed and printed.index(verdict["sentence"]) < printed.index(said) < printed.index("report: ")
    assert said in page and page.index(f"<h2>{verdict['verdict']}</h2>") < page.index(said)


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def test_the_report_keeps_the_picture_of_its_run_whatever_is_measured_again(quiet_run: Path, tmp_path: Path) -> None:
    run = RunDirectory(copied(quiet_run, tmp_path / "run"))
    picture = json.loads(run.document_weights.read_text())
    other = picture | {"id": "another text"}  # as `replug evaluate` with another ensemble.share leaves it
    (run.evaluation / "language_modelling/document_weights.json").write_text(json.dumps(other))
    show_results(run)
    assert f"on text {picture['id']}," in run.report.read_text() and "another text" not in run.report.read_text()


def test_a_finished_run_of_another_lm_or_set_is_not_shown_as_this_one(quiet_run: Path, tmp_path: Path) -> None:
    run = copied(quiet_run, tmp_path / "run")
    for name in ("lm.identity", "data.sha256"):
        content = read_mark(quiet_run / "inputs.json", "")
        write_mark(run / "inputs.json", {**content, "inputs": {**content["inputs"], name: "other"}})
        with pytest.raises(UserError, match=rf"{name} is .*, but the run in .* was made with 'other'"):
            train(config_of(run))


def test_a_run_dir_that_cannot_be_one_is_named_before_anything_starts(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "file").write_text("mine")
    ended = replug("train", ROOT / "configs/debug.yaml", f"run_dir={tmp_path / 'file/run'}")
    assert (ended.status, ended.errors) == (
        2,
        f"replug: run_dir: {tmp_path / 'file'} is a file; expected a folder, or a name that is free\n",
    )


def test_a_foreign_run_dir_is_refused_before_anything_is_written_into_it(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    ended = replug("train", ROOT / "configs/debug.yaml", f"run_dir={tmp_path}")
    assert ended.status == 2
    assert "holds thesis.tex, which is not part of" in ended.errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
