"""Real sets beside the repository (../shared/data); tests of them are skipped where they are not there."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def shared(name: str) -> Path:
    """The path of a set, or a skipped test."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not here; it is no part of the repository")
    return path
