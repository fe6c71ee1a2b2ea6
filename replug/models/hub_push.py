"""An encoder's folder as a model on the hub, or on what speaks like it (HF_ENDPOINT), through huggingface_hub.

A new repository is private unless told otherwise. One that is there gets a new commit where it is empty, as after an
interrupted push, or holds an earlier export of ours; what is somebody else's is refused, and so is one that others can
read where private was asked for. A commit has all files and removes those that the folder lacks.

The token comes from HF_TOKEN alone: none that lies in a home directory is taken, and it stands in no message.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from replug.config.errors import UserError
from replug.config.plain_text import plain_line

log = logging.getLogger(__name__)

TOKEN = "HF_TOKEN"
OWN_TAG = "replug-lsr"  # of the card of every export
OF_THE_HUB = ".gitattributes"  # which it puts into a new repository itself
UNAUTHORIZED, FORBIDDEN, CONFLICT = 401, 403, 409
MODEL_FILES = (".json", ".txt", ".md", ".safetensors", ".model", ".jinja")


@dataclass(frozen=True, slots=True)
class HubRepository:
    """OWNER/NAME at `endpoint`. Raises UserError for another name, and where HF_TOKEN is not set."""

    name: str
    is_public: bool = False

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise UserError(f"--push {plain_line(self.name)}: {plain_line(str(error))}") from error
        if self.name.count("/") != 1:
            raise UserError(f"--push {self.name}: expected OWNER/NAME, with your user name or organization")
        if not os.environ.get(TOKEN):
            raise UserError(
                f"--push {self.name}: {TOKEN} is not set; expected a token that may write, in that variable"
            )

    @property
    def endpoint(self) -> str:
        return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")

    @property
    def url(self) -> str:
        return f"{self.endpoint}/{self.name}"

    def push(self, folder: Path) -> None:
        """One commit with the folder's files. Raises UserError for what the hub refuses, or does not answer."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if other := [path for path in files if path.suffix not in MODEL_FILES]:
            raise UserError(f"{other[0]} is no file of an exported retriever; expected {', '.join(MODEL_FILES)}")
        names = [path.relative_to(folder).as_posix() for path in files]
        size = sum(path.stat().st_size for path in files) / 1e6
        log.info(f"pushing {len(files)} files, {size:.1f} MB, to {self.url} ({self._visibility})")
        api = HfApi(endpoint=self.endpoint, token=os.environ[TOKEN])
        with self._errors_in_plain_words():
            there = self._create(api)
            stale = [CommitOperationDelete(name) for name in there if name not in (*names, OF_THE_HUB)]
            added = [CommitOperationAdd(name, path) for name, path in zip(names, files, strict=True)]
            api.create_commit(self.name, [*added, *stale], commit_message="A retriever tuned by REPLUG LSR")

    @property
    def _visibility(self) -> str:
        return "public" if self.is_public else "private"

    def _create(self, api: HfApi) -> list[str]:
        """The names of the files that are there already."""
        try:
            api.create_repo(self.name, private=not self.is_public)
        except HfHubHTTPError as error:
            if error.response.status_code != CONFLICT:
                raise
            return self._files_of_ours(api)
        return []

    def _files_of_ours(self, api: HfApi) -> list[str]:
        """Of the repository that has the name. Raises UserError where it is another's, or seen by others than asked."""
        info = api.model_info(self.name)
        names = [of.rfilename for of in info.siblings or []]
        if set(names) - {OF_THE_HUB} and OWN_TAG not in (info.tags or []):
            raise UserError(f"{self.url} exists already, and is no export of replug; give another name")
        if bool(info.private) == self.is_public:
            raise UserError(
                f"{self.url} exists already and is not {self._visibility}; change it there, or ask for that"
            )
        return names

    @contextmanager
    def _errors_in_plain_words(self) -> Iterator[None]:
        try:
            yield
        except HfHubHTTPError as error:
            raise UserError(self._refused(error)) from error
        except (HTTPError, ConnectionError) as error:  # of ours, UserError is neither
            raise UserError(
                f"--push {self.name}: {self.endpoint} is not reached ({self._safe(error)}); is there a network, and is "
                "HF_ENDPOINT right? The same command tries again"
            ) from error

    def _refused(self, error: HfHubHTTPError) -> str:
        status = error.response.status_code
        if status == UNAUTHORIZED:
            return f"{self.endpoint} does not accept the token in {TOKEN} (401); expected one that may write"
        if status == FORBIDDEN:
            return (
                f"{self.endpoint} lets the token in {TOKEN} write nothing to {self.name} (403); expected one that may, "
                "and an OWNER that is you or your organization"
            )
        return f"--push {self.name}: {self.endpoint} answered {status}: {self._safe(error.server_message or error)}"

    def _safe(self, said: object) -> str:
        return plain_line(str(said)).replace(os.environ[TOKEN], f"${TOKEN}")
