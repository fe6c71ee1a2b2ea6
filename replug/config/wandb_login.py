"""Tell whether an online run of W&B finds a login, which W&B itself asks for when the first step is logged."""

import os
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

API = "https://api.wandb.ai"


def wandb_login() -> str | None:
    """Return where the key of W&B comes from, which is not read out: a variable's name or a file; None without one."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or API).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    with suppress(NetrcParseError, OSError):
        if netrc(path).authenticators(host):
            return str(path)
    return None
