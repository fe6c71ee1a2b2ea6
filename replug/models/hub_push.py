"""Push an encoder's folder to the hub, or to what speaks like it (HF_ENDPOINT), through huggingface_hub.

A new repository is private unless told otherwise. An existing one gets a new commit if it is empty, as after an
interrupted push, or holds an earlier export of ours; another one is refused, and so is one that others can read if
private was asked for. A commit has all files and removes those that the folder lacks.

The token is the hub's own: that of HF_TOKEN, or else of `hf auth login`. It stands in no message.
"""

import logging
import os
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from replug.config.errors import UserError
from replug.config.plain_text import plain_line

log = logging.getLogger(__name__)

TOKEN = "HF_TOKEN"
OWN_TAG = "replug-lsr"  # in the card of every export
OF_THE_HUB = ".gitattributes"  # which the hub puts into a new repository itself
NOT_ALLOWED, CONFLICT = (401, 403), 409
PATTERNS = ["*.json", "*.txt", "*.md", "*.safetensors", "*.model", "*.jinja"]  # files of an exported retriever


def require_repository(name: str) -> None:
    """Raise UserError for a name that is not OWNER/NAME, and if nobody is logged in."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {plain_line(name)}: {plain_line(str(error))}") from error
    if name.count("/") != 1:
        raise UserError(f"--push {name}: expected OWNER/NAME, with your user name or organization")
    if not get_token():
        raise UserError(f"--push {name}: there is no token; log in by `hf auth login`, or set {TOKEN}")


def push_folder(folder: Path, name: str, is_public: bool = False) -> str:
    """Commit the folder's files and return the model's address. Raises UserError if the hub refuses or is silent."""
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    url, visibility = f"{endpoint}/{name}", "public" if is_public else "private"
    log.info(f"pushing {folder} to {url} ({visibility})")
    api = HfApi(endpoint=endpoint, token=get_token())
    try:
        try:
            api.create_repo(name, private=not is_public)
        except HfHubHTTPError as error:
            if error.response.status_code != CONFLICT:
                raise
            existing = api.model_info(name)
            files = {sibling.rfilename for sibling in existing.siblings or []}
            if files - {OF_THE_HUB} and OWN_TAG not in (existing.tags or []):
                raise UserError(f"{url} exists already, and is not an export of replug; give another name") from None
            if bool(existing.private) == is_public:
                raise UserError(f"{url} exists already and is not {visibility}; change it, or ask for that") from None
        message = "A retriever tuned by REPLUG LSR"
        api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=PATTERNS, delete_patterns="*", commit_message=message
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = f"; expected a token that may write there (`hf auth login`, or {TOKEN})" if status in NOT_ALLOWED else ""
        reason = _safe(error.server_message or error)
        raise UserError(f"--push {name}: {endpoint} answered {status}: {reason}{fix}") from error
    except (HTTPError, ConnectionError) as error:  # of ours, UserError is neither
        raise UserError(
            f"--push {name}: {endpoint} is not reached ({_safe(error)}); check the network and HF_ENDPOINT, then run "
            "the same command again"
        ) from error
    return url


def _safe(text: object) -> str:
    return plain_line(str(text)).replace(get_token() or TOKEN, f"${TOKEN}")
