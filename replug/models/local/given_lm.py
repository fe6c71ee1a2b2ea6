"""An LM that a program gives as an object: `lm.path=python:NAME`, where NAME is the object's class.

Each scorer replica has a copy, which Ray pickles and hands to a process of this user: no pickle is read from a file.
The object is known while the block of `given_lm` runs, in its thread. Another process that meets the name in a run's
configuration is told so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM, BlackBoxLM
from replug.models.local.local_source import LocalSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "python:"
_given: ContextVar[BlackBoxLM | None] = ContextVar("given_lm", default=None)


@contextmanager
def given_lm(lm: BlackBoxLM | None) -> Iterator[None]:
    """Make the object the LM of `lm.path=python:NAME` while the block runs."""
    token = _given.set(lm)
    try:
        yield
    finally:
        _given.reset(token)


def name_of(lm: BlackBoxLM) -> str:
    """Return what `lm.path` calls the object."""
    return f"{PREFIX}{type(lm).__name__}"


def source(lm: LMConfig) -> "GivenSource | None":
    """Return the given object. Raises UserError in a process that has none."""
    if not (lm.path or "").startswith(PREFIX):
        return None
    given = _given.get()
    if given is None:
        raise UserError(
            f"lm.path is {lm.path}, an object of the program that made this; expected the same object as lm= in "
            "Python, or lm.path=DIR"
        )
    return GivenSource(given, lm.tokens_per_batch)


@dataclass(frozen=True, slots=True)
class GivenSource(LocalSource):
    """The object, and how it gets to its replicas."""

    lm: BlackBoxLM
    tokens_per_batch: int | None = None
    mark: str = ""

    @property
    def identity(self) -> str:
        return self.lm.identity + self.mark

    @property
    def max_tokens(self) -> int | None:
        return self.lm.max_tokens

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return getattr(self.lm, "tokenizer", None)

    def load(self, spread: bool = False) -> BlackBoxLM:
        return self.lm

    def open(self, lm: LMConfig) -> AsyncLM:
        try:
            return LocalSource.open(self, lm)
        except TypeError as error:
            raise UserError(
                f"lm: a {type(self.lm).__name__} cannot be sent to the scorers: {str(error).splitlines()[0]}; expected "
                "an object that pickle takes, which opens files and connections in its first call"
            ) from error
