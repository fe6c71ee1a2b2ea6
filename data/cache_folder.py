"""Where this user's runs keep what they can make again: converted models, hashes of large files."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$REPLUG_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REPLUG_CACHE") or Path(base) / "replug")
