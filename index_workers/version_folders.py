"""Where the versions of an index lie, and which of them can be searched: names of files alone, read by plans too."""

import re
from pathlib import Path

MANIFEST = "manifest.json"  # written last: a version with one is published
ENCODER = "encoder"


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def version_numbers(root: Path) -> list[int]:
    """Versions that were begun, oldest first."""
    names = (path.name for path in root.glob("v*") if path.is_dir())
    return sorted(int(name[1:]) for name in names if re.fullmatch(r"v\d{6,}", name))


def index_folder(directory: Path) -> Path:
    """The index of a run directory, or the directory itself."""
    return directory / "index" if (directory / "index").is_dir() else directory


def newest_encoder(directory: Path) -> Path | None:
    """Of the newest published version in a run directory or an index's folder; None where there is none."""
    root = index_folder(directory)
    folders = (version_folder(root, version) for version in reversed(version_numbers(root)))
    return next((folder / ENCODER for folder in folders if (folder / MANIFEST).is_file()), None)
