"""The source of an LM: what a run must know of it before anything heavy starts, and how it is put to work.

Local weights, servers and stand-ins are backends. Each is a module that offers one function, a `Backend`; the list of
them is in `models/build.py`. Nothing else asks which backend it is.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from replug.cluster.background import InlineExecutor
from replug.config.schema import LMConfig
from replug.models.batching import LMShape, tokens_per_unit
from replug.models.black_box_lm import AsyncLM, BlackBoxLM, Call, pass_counts

if TYPE_CHECKING:  # seconds to import, which the stand-in's actors can do without
    from transformers import PreTrainedTokenizerBase


class LMSource(Protocol):
    """An LM that is not at work yet."""

    @property
    def identity(self) -> str:
        """Return the opened LM's identity: equal identities give equal scores."""
        ...

    def prompted_by(self, mark: str) -> "LMSource":
        """Return the source with this at the end of its identity: it tells apart prompts of other templates."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Return the opened LM's longest input in tokens. None means no limit."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the actors that a cluster must make room for: `score`, or none without Ray."""
        ...

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the LM's own; None where it is not known. Does not reach for the LM."""
        ...

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        """Reach a server, so that its faults are told before anything heavy starts.

        `budget_file` counts its requests, in memory by default. `cache` knows a model again that was met before.
        Raises UserError, and BudgetSpent.
        """
        ...

    def open(self, lm: LMConfig) -> AsyncLM:
        """Put the LM to work, by its section as it is laid out. Ray must run where `roles` are wanted."""
        ...

    def open_here(self) -> AsyncLM:
        """Put the LM to work in this process, without Ray."""
        ...


# Returns the source that the section names; None where another backend is meant.
Backend = Callable[[LMConfig], LMSource | None]


class InProcessLM(AsyncLM):
    """An `AsyncLM` round `lm`, with the units that a pool of it on processors would have."""

    def __init__(self, lm: BlackBoxLM, unit_tokens: int | None = None, identity: str | None = None) -> None:
        self._lm = lm
        self.identity, self.max_tokens = identity or lm.identity, lm.max_tokens
        self.unit_tokens = unit_tokens or tokens_per_unit(LMShape(), on_gpu=False)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        return InlineExecutor().submit(call.run, self._lm)

    def metrics(self) -> dict[str, float]:
        """Return the share of its passes that is not padding."""
        counts = pass_counts(self._lm)
        fill = counts.tokens / counts.padded_tokens if counts.padded_tokens else 1.0
        return {"batch_fill": fill, "halved_passes": float(counts.halved)}

    def close(self) -> None:
        """Nothing is under way."""
