"""How a run was made, in lines that a reader of its table needs: models and their sizes, the command, the commit."""

from collections.abc import Callable, Mapping
from typing import Any

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size

SHOWN_COMMIT = 12


def provenance_lines(config: Config, environment: Mapping[str, Any], lm_identity: str | None) -> list[str]:
    """Of a run by its configuration, its environment.json and the identity of its LM."""
    lm = f"{config.lm.model} at {config.lm.url}" if config.lm.url else _sized(str(config.lm.path), lm_size)
    models = f"retriever {_sized(config.retriever.path, encoder_size)}; LM {lm}"
    lines = [f"models: {models}{f', identity {lm_identity}' if lm_identity else ''}"]
    if command := environment.get("command"):
        lines.append(f"command: {command}")
    return [*lines, f"code: {_code(environment)}"]


def _sized(path: str, size_of: Callable[[str], ModelSize]) -> str:
    try:
        return f"{path} ({size_of(path).parameters / 1e6:,.1f}M parameters)"
    except UserError:  # no table knows it; the plan asks the user, who need not know it here
        return path


def _code(environment: Mapping[str, Any]) -> str:
    commit = environment.get("git_commit")
    changed = " with changes" if environment.get("git_dirty") else ""
    packages = environment.get("packages", {})
    said = f"commit {commit[:SHOWN_COMMIT]}{changed}" if commit else "no git checkout"
    return ", ".join([said, *(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)])
