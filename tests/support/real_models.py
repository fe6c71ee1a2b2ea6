"""The real encoder and LM that are Python packages; tests of them are skipped where they are not installed."""

import importlib.metadata

import pytest

from replug.models.packaged import MINILM, SMOLLM2, resolve_encoder_path, resolve_lm_path


def real_encoder() -> str:
    """The folder of MiniLM, or a skipped test."""
    _require(MINILM)
    return resolve_encoder_path("package:minilm")


def real_lm() -> str:
    """The folder of SmolLM2, or a skipped test."""
    _require(SMOLLM2)
    return resolve_lm_path("package:smollm2")


def _require(requirement: str) -> None:
    try:
        importlib.metadata.distribution(requirement.split("==")[0])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{requirement} is not installed; `make install` does it")
