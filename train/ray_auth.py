"""Ray's authentication, settled before Ray is imported: it reads its mode when it loads, and never again.

A cluster of our own gets a token of its own in a file that only this user can read, so that no other user of
the machine can send it work, and nothing is written into the home directory.
"""

import os
import secrets
import sys
import tempfile
from pathlib import Path

from configs.schema import Config


def configure_ray_auth(config: Config) -> None:
    """Set RAY_AUTH_MODE, and a token for a cluster that is yet to be started. What the user has set stays."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    assert "ray" not in sys.modules, "Ray has read its authentication mode already"
    os.environ["RAY_AUTH_MODE"] = config.ray.auth.value
    if config.ray.auth.value == "token" and config.ray.address is None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_write_token())


def _write_token() -> Path:
    path = Path(tempfile.mkdtemp(prefix="replug-ray-")) / "token"  # the folder is 0700
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path
