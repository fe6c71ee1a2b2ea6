"""The measurement of a GPU, where the CPU stands for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import runs
from benchmarks.gpu.kit import Figure, Kit
from replug.config.load import load_config

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=timeout)


def test_without_a_gpu_it_says_so_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    assert gpu.main() == 2 and "no GPU that torch can use" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_stage_that_fails_or_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = "import sys, time; name = sys.argv[1]\nif name == 'hangs': time.sleep(60)\nif name == 'fails': sys.exit(3)"
    started = subprocess.Popen

    def stand_in(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return started([sys.executable, "-c", python, *command[3:]], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", stand_in)
    monkeypatch.setattr(gpu, "STAGES", {name: (lambda kit: None, 1) for name in ("fails", "hangs", "works")})
    problems = gpu.run_stages(["fails", "hangs", "works"], tmp_path, pretends=False)
    assert problems == {"fails": "failed with status 3", "hangs": "not done after 1 s"}


def test_a_report_marks_what_is_not_as_asked(tmp_path: Path) -> None:
    kit = Kit("embedding", tmp_path, pretends=True)
    kit.say("1 - cosine, largest", 0.02, at_most=0.01)
    kit.say("documents", 17_000.0, "documents/s", at_least=9000)
    kit.say("stops", float("nan"), at_most=0)
    figures = gpu.read_figures(tmp_path)
    assert [figure.is_as_asked for figure in figures] == [False, True, False]
    gpu.write_report(tmp_path, figures, {"training": "failed with status 1"})
    shown = (tmp_path / "report.md").read_text()
    assert "| 1 - cosine, largest | 0.02 | at most 0.01 **missed** |" in shown
    assert "| documents | 1.7e+04 documents/s | at least 9000 |" in shown
    assert "## training\n\n**failed with status 1**" in shown
    assert Figure("a", "b", "text").is_as_asked


def test_every_run_is_of_keys_that_there_are() -> None:
    """These run on GPUs alone; so far it can be seen without one."""
    for keys in ({**runs.SHORT, **runs.FLOAT32}, runs.BFLOAT16):
        load_config(ROOT / "configs/quickstart.yaml", [f"{key}={value}" for key, value in keys.items()])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_stages_pass_where_the_cpu_stands_for_the_gpu(tmp_path: Path) -> None:
    done = _run("--pretend", "--out", str(tmp_path / "out"), timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {json.loads(line)["stage"] for line in (tmp_path / "out/figures.jsonl").read_text().splitlines()}
    assert told == set(gpu.STAGES)
