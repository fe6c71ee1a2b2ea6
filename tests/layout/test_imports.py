"""The import contracts of pyproject.toml refuse what they forbid: each forbidden import is planted and seen refused."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, ROOT

LINTER = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
PLANTED = {
    **{
        f"{package}/planted_ray.py": ("import ray", "ray is imported only where")
        for package in PACKAGES
        if package != "slurm"
    },
    **{
        f"{package}/planted_faiss.py": ("import faiss", "faiss lives in one module")
        for package in PACKAGES
        if package != "slurm"
    },
    "models/http/planted.py": ("import ray", "ray is imported only where"),
    "data/planted_omegaconf.py": ("import omegaconf", "omegaconf is the configuration loader's"),
    "models/planted_lightning.py": ("import pytorch_lightning", "lightning is the trainer's"),
    "train/planted_wandb.py": ("import wandb", "wandb comes by way of"),
    "planning/planted_torch.py": ("import torch", "a plan needs no model"),
    "configs/planted_data.py": ("import replug.data.records", "packages stand on each other"),
    "data/planted_cluster.py": ("import replug.cluster.layout", "packages stand on each other"),
    "cluster/planted_models.py": ("import replug.models.prompt", "packages stand on each other"),
    "models/planted_index.py": ("import replug.index_workers.merge", "packages stand on each other"),
    "index_workers/planted_evals.py": ("import replug.evals.metrics", "packages stand on each other"),
    "evals/planted_train.py": ("import replug.train.loss", "packages stand on each other"),
    "planning/planted_web.py": ("import replug.web.urls", "packages stand on each other"),
    "web/planted_answering.py": ("import replug.answering.prompts", "packages stand on each other"),
    "answering/planted_serving.py": ("import replug.serving.limits", "packages stand on each other"),
    "serving/planted_evals.py": ("import replug.evals.metrics", "packages stand on each other"),
    "planning/planted_train.py": ("import replug.train.loss", "packages stand on each other"),
    "slurm/planted_configs.py": ("import replug.configs.errors", "slurm starts commands as processes"),
    "train/planted_rehearsal.py": ("import replug.rehearsal.scaling", "packages stand on each other"),
    "train/planted_commands.py": ("import replug.commands.cli", "packages stand on each other"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a copy of the code with all of them in it."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "replug", folder / "replug", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, (line, _) in PLANTED.items():
        (folder / "replug" / path).write_text(f"{line}\n")
    done = subprocess.run(
        [sys.executable, "-c", LINTER], cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", PLANTED)
def test_a_forbidden_import_is_refused_wherever_it_is_planted(path: str, report: str) -> None:
    _, contract = PLANTED[path]
    module = "replug." + path.removesuffix(".py").replace("/", ".")
    parts = re.split(r"^(.+)\n-+$", report[report.index("Broken contracts") :], flags=re.MULTILINE)
    section = next(text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.startswith(contract))
    assert f"{module} ->" in section, section


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_one_name(package: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f"import {package}\n")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert f"`{package}` is banned: replug.{package}" in done.stdout, done.stdout + done.stderr
