"""The benchmarks of a GPU, where the CPU stands for it, and of large indexes, whose vectors are grown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.grown_vectors import NEIGHBOURS, Grower, neighbours_of
from benchmarks.host_search import rows_of
from tests.support.command_line import ROOT


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


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_stages_pass_where_the_cpu_stands_for_the_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--out", str(tmp_path / "out")]
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {json.loads(line)["stage"] for line in (tmp_path / "out/figures.jsonl").read_text().splitlines()}
    assert stages == set(gpu.STAGES)


def test_grown_vectors_follow_from_the_number_of_their_block_and_their_nearest_real_neighbours() -> None:
    rng = np.random.default_rng(0)
    centres = np.repeat(rng.standard_normal((4, 16)), NEIGHBOURS + 1, axis=0)  # tight clusters, one after the other
    real = centres + 0.1 * rng.standard_normal(centres.shape)
    real = (real / np.linalg.norm(real, axis=1, keepdims=True)).astype(np.float16)
    near, own = neighbours_of(real).numpy(), np.arange(len(real))[:, None]
    assert near.shape == (4 * (NEIGHBOURS + 1), NEIGHBOURS)
    assert (near // (NEIGHBOURS + 1) == own // (NEIGHBOURS + 1)).all() and (near != own).all()
    block, same, other = Grower(real).block(3, 50), Grower(real).block(3, 50), Grower(real).block(4, 50)
    assert block.dtype == np.float16 and block.shape == (50, 16)
    assert (block == same).all() and (block != other).any()
    assert np.allclose(np.linalg.norm(block.astype(np.float32), axis=1), 1, atol=2e-3)


def test_shards_have_every_row_once_in_whole_blocks() -> None:
    parts = [rows_of(number, 3, 1_000_000) for number in range(3)]
    assert [row for part in parts for row in (part.start, part.stop)] == [0, 327_680, 327_680, 655_360, 655_360, 10**6]
