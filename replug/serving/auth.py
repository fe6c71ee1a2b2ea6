"""Who may ask: whoever has the token, and without one this machine alone.

Without a token a server listens on loopback only. A page of a browser there could still reach it under a name that it
made to mean loopback (DNS rebinding), so the name in `Host` must be loopback's too.
"""

import hmac
import ipaddress
import os

from replug.config.errors import UserError
from replug.serving.errors import ApiError

VARIABLE = "REPLUG_SERVE_TOKEN"
LEAST_CHARACTERS = 16


def token_for(host: str) -> str | None:
    """The token of the environment. Raises UserError for one that is guessed soon, and for none beyond loopback."""
    token = os.environ.get(VARIABLE)
    if token is None:
        if not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others; expected a token for them in ${VARIABLE}")
        return None
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"${VARIABLE} is no token; expected {LEAST_CHARACTERS} printable ASCII characters or more without a space, "
            "such as of `openssl rand -hex 32`"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_allowed(token: str | None, authorization: str | None, host: str | None) -> None:
    """Raise ApiError for a request that may not be answered."""
    if token is None:
        if not is_loopback(_name_of(host or "")):
            raise ApiError(403, f"Host is {host}; expected this machine's own, such as 127.0.0.1", code="wrong_host")
        return
    scheme, _, given = (authorization or "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(401, "expected the server's token: Authorization: Bearer TOKEN", code="invalid_api_key")


def _name_of(host: str) -> str:
    """Without the port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
