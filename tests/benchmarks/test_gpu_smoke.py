"""The script for whoever has GPUs, tried without one: a check that fails or hangs hides no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_smoke
from benchmarks.gpu_smoke import CHECKS, Check, Figure, Place, Result, run_checks, write_report
from replug.config.load import load_config
from tests.support.real_models import real_encoder

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_smoke", "--out", str(tmp_path / "out")]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no GPU that torch can use" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_check_that_fails_or_hangs_hides_no_other(tmp_path, monkeypatch):
    python = "import json, sys, time; name, out = sys.argv[-3], sys.argv[-1]\n"
    python += "if name == 'hangs': time.sleep(60)\nif name == 'fails': raise OSError('no such device')\n"
    python += "figure = {'name': 'd', 'value': 2.0, 'at_most': 1.0 if name == 'wrong' else 3.0}\n"
    python += "json.dump([figure], open(f'{out}/{name}.json', 'w'))"
    started = subprocess.Popen

    def stand_in(command: list[str], **options: object) -> subprocess.Popen:
        return started([sys.executable, "-c", python, *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", stand_in)
    names = ("fails", "hangs", "wrong", "well", "compared", "two")
    checks = {name: Check(lambda place: []) for name in names}
    checks["compared"] = Check(lambda place: [], reference="wrong")
    checks["two"] = Check(lambda place: [], num_gpus=2)
    monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
    results = run_checks(names, Place(tmp_path, False), num_gpus=1, seconds=2)
    assert [result.state for result in results] == ["failed", "timed out", "failed", "passed", "skipped", "skipped"]
    assert "OSError: no such device" in results[0].why
    assert [result.why for result in results[4:]] == ["wrong did not pass", "2 GPUs are needed, 1 are here"]


def test_a_report_says_what_was_measured_and_the_end_of_a_failed_log(tmp_path):
    figure = Figure("1 - cosine, largest", 0.002, 0.01)
    results = [Result("encoder", "passed", 3.0, [figure]), Result("lm", "failed", 1.0, why="a\nOut of memory")]
    write_report(tmp_path, {"GPUs": "none"}, results)
    shown = (tmp_path / "report.md").read_text()
    assert "| encoder | passed | 3 | 1 - cosine, largest 0.002 (at most 0.01) |" in shown
    assert "## lm: the end of its log\n\n```\na\nOut of memory\n```" in shown
    assert json.loads((tmp_path / "report.json").read_text())["checks"][0]["figures"][0]["at_most"] == 0.01


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("train")])
def test_every_run_is_of_keys_that_there_are(name, tmp_path, monkeypatch):
    """On GPUs, as far as that can be seen without one: the command line is taken apart and not run."""
    commands: list[list[str]] = []

    def ended(command: list[str], **_: object) -> None:
        commands.append(command)
        run = Path(next(word for word in command if word.startswith("run_dir=")).removeprefix("run_dir="))
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(
            '{"index/version": 0, "train/loss": 0.5}\n{"index/version": 1, "train/loss": 0.5}\n'
        )

    monkeypatch.setattr(subprocess, "run", ended)
    place = Place(tmp_path, False)
    if (reference := CHECKS[name].reference) is not None:
        CHECKS[reference].run(place)
    figures = CHECKS[name].run(place)
    assert all(figure.is_well for figure in figures)
    for command in commands:
        load_config(Path(command[4]), command[5:])


LIGHT = ("encoder_on_cpu", "encoder_float32", "exact_search")


def test_an_encoder_and_searches_agree_with_themselves_where_the_cpu_stands_for_gpus(tmp_path, monkeypatch):
    real_encoder()
    monkeypatch.setattr(gpu_smoke, "NUM_TEXTS", 2)
    figures = {name: CHECKS[name].run(Place(tmp_path, True)) for name in LIGHT}
    assert all(figure.is_well for found in figures.values() for figure in found)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_whole_script_passes_where_the_cpu_stands_for_gpus(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_smoke", "--pretend-cpu", "--out", str(tmp_path / "out")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + (tmp_path / "out/report.md").read_text()
    assert len(json.loads((tmp_path / "out/report.json").read_text())["checks"]) == len(CHECKS)
