"""Where an LM comes from: what a run must know of it before anything heavy starts, and how it is put to work.

Local weights, servers and stand-ins are backends. Each is a module that offers one function, a `Backend`; the list of
them is in `models/build.py`. Nothing else asks which backend it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM

if TYPE_CHECKING:  # seconds to import, which the stand-in's actors can do without
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LMFiles:
    """Files that an LM may use. Without a budget file, requests are counted in memory only; without a cache, an LM
    that was met before is not known again.
    """

    budget: Path | None = None
    cache: Path | None = None


class LMSource(Protocol):
    """An LM that is not at work yet."""

    @property
    def identity(self) -> str:
        """As the opened LM's: equal identities give equal scores."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """As the opened LM's: longest input in tokens, None where there is no limit."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """Whose actors a cluster must make room for: `score` (`cluster.gpu_shares`), or none and no need of Ray."""
        ...

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The LM's own; None where it is not known. Does not reach for the LM."""
        ...

    def connect(self) -> None:
        """Reach what is elsewhere, so that what is wrong with it is told before anything heavy starts.

        Raises UserError, and BudgetSpent.
        """
        ...

    def open(self, lm: LMConfig) -> AsyncLM:
        """The LM at work, by its section as it is laid out. Ray must run where `roles` are wanted."""
        ...

    def open_here(self) -> AsyncLM:
        """The LM at work in this process, without Ray."""
        ...


class Backend(Protocol):
    """A way of having an LM."""

    def __call__(self, lm: LMConfig, files: LMFiles) -> LMSource | None:
        """The source that the section names; None where another backend is meant."""
        ...
