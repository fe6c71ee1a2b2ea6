"""Where an LM comes from: what a run must know of it before anything heavy starts, and how it is put to work.

Local weights, servers and stand-ins are backends. Each is a module that offers one function, a `Backend`; the list of
them is in `models/build.py`. Nothing else asks which backend it is.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from replug.cluster.background import InlineExecutor
from replug.config.schema import LMConfig
from replug.models.batching import LMShape, tokens_per_unit, units_of_similar_length
from replug.models.black_box_lm import AsyncLM, ContinuationScore, LocalLM, WaitsForSubmitted
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop

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


class InProcessLM(WaitsForSubmitted):
    """An `AsyncLM` round `lm`, with the units that a pool of it on processors would have."""

    def __init__(self, lm: LocalLM, unit_tokens: int | None = None) -> None:
        self._lm = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._unit_tokens = unit_tokens or tokens_per_unit(LMShape(), on_gpu=False)
        self._executor = InlineExecutor()

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return units_of_similar_length(prefixes, continuations, self._unit_tokens)

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        return self._executor.submit(self._lm.score, prefixes, continuations, opening=opening)

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        return self._executor.submit(self._lm.generate_ensemble, prompts, weights, options)

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        return self._executor.submit(self._lm.sample, prompts, options)

    def metrics(self) -> dict[str, float]:
        """The share of its passes that is no padding."""
        counts = self._lm.counts
        return {"batch_fill": counts.tokens / counts.padded_tokens if counts.padded_tokens else 1.0}

    def close(self) -> None:
        """Nothing is under way."""
