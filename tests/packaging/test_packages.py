"""The packages work: sdist, the wheel that is made from it, a fresh environment, a training run by a shipped name."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import replug
from tests.support.command_line import ROOT, clean_environment

# Modules of ours, and of those that a run imports, as a user's folder may hold them.
DECOYS = ("replug", "torch", "ray", "tokenizers", "random", "pickle", "numpy", "lxml")


def run(*command: object, cwd: Path, **environment: str) -> str:
    own = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=own | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree: Path, target: str, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=tree)
    [built] = folder.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as PyPI's users and `python -m build` have it."""
    folder = tmp_path_factory.mktemp("built")
    with tarfile.open(build(ROOT, "sdist", folder)) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extractall(folder)  # our own; `filter` came with Python 3.11.4
    [tree] = (path for path in folder.iterdir() if path.is_dir())
    return build(tree, "wheel", folder / "from_sdist")


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    of_checkout = build(ROOT, "wheel", tmp_path)
    names = [set(zipfile.ZipFile(path).namelist()) for path in (wheel, of_checkout)]
    assert names[0] == names[1]
    shipped = {"replug/train/loss.py", "replug/configs/debug.yaml", "replug/slurm/job.sbatch", "replug/py.typed"}
    assert shipped <= names[0]
    assert {name.split("/")[0] for name in names[0]} == {"replug", f"replug-{replug.__version__}.dist-info"}
    assert f"\nversion: {replug.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_page_of_pypi_has_no_link_to_a_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(path: Path) -> str:
        return zipfile.ZipFile(path).read(f"replug-{replug.__version__}.dist-info/METADATA").decode()

    link = r"\]\((?!https://|#)"
    assert re.search(link, (ROOT / "README.md").read_text()) and not re.search(link, described(wheel))
    monkeypatch.setenv("REPO_URL", "https://example.org/replug")
    page = described(build(ROOT, "wheel", tmp_path))
    assert "](https://example.org/replug/raw/main/docs/weights.png)" in page and not re.search(link, page)
    assert "Project-URL: Homepage, https://example.org/replug" in page


@pytest.mark.nightly
def test_an_installed_wheel_trains_by_the_name_of_a_shipped_configuration_and_imports_no_module_of_its_folder(
    wheel: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a new environment, which sees our environment's other packages."""
    folder = tmp_path_factory.mktemp("fresh") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    [site] = folder.glob("lib/python*/site-packages")
    others = importlib.metadata.distribution("torch").locate_file("")
    (site / "others.pth").write_text(f"{others}\n")  # its own .pth files, our editable install's, are not read
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    python = folder / "bin/python"
    where = run(python, "-c", "import replug.train.loss as loss; print(loss.__file__)", cwd=tmp_path)
    assert where.startswith(str(folder))
    for name in DECOYS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the own {name}.py was imported')\n")
    train = ("-P", "-m", "replug.commands.cli", "train", "debug", "train.max_steps=3", "run_dir=mine")
    run(python, *train, cwd=tmp_path)
    assert (tmp_path / "mine/results.json").is_file()
    (tmp_path / "docs").mkdir()
    for number in range(12):
        words = " ".join(f"w{number}x{i}" for i in range(900))
        (tmp_path / f"docs/{number}.html").write_text(f"<html><body><main><p>{words}</p></main></body></html>")
    keys = ("data.source=docs", "data.out=out", "lm.path=stand_in", "retriever.path=stand_in")
    run(python, "-P", "-m", "replug.commands.cli", "prepare", "own_data", *keys, cwd=tmp_path)


def test_an_editable_install_hides_no_folder_of_the_user(tmp_path: Path) -> None:
    for name in ("data", "models", "train", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("")
    imports = "import data.mine, models.mine, train.mine, tests.mine, replug.data, replug.train"
    run(sys.executable, "-c", imports, cwd=tmp_path)
