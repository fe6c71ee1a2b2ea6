"""The packages of `replug` and their modules, found by listing."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "replug").iterdir() if (path / "__init__.py").is_file())


def modules() -> Iterator[Path]:
    """Every module of ours, by its path below the repository."""
    for package in PACKAGES:
        yield from sorted((ROOT / "replug" / package).resolve().rglob("*.py"))
