"""The source of an LM that computes on our own machines: replicas on Ray, or one in this process."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from replug.cluster.layout import scorers
from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM, LocalLM
from replug.models.in_process_lm import InProcessLM
from replug.models.pass_size import LMShape, tokens_per_unit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalSource(ABC):
    """An `LMSource` for whatever `load` loads. Subclasses are records that travel to actors by pickle."""

    roles = ("score",)
    tokens_per_batch: int | None  # padded tokens in one pass; None for a default by hardware and size

    @property
    @abstractmethod
    def identity(self) -> str:
        """As the loaded LM's, without loading it."""

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """As the loaded LM's, without loading it."""

    @property
    def shape(self) -> LMShape:
        """Of the LM's layers, without loading them."""
        return LMShape()

    @abstractmethod
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The LM's own."""

    @abstractmethod
    def load(self, spread: bool = False) -> LocalLM:
        """The LM in this process; `spread` lays its layers over all visible GPUs."""

    def connect(self) -> None:  # noqa: B027 - weights are read when they are loaded
        """Nothing is elsewhere."""

    def open(self, lm: LMConfig) -> AsyncLM:
        from replug.models.scorer_pool import ScorerPool  # imports Ray, which `open_here` does without

        replicas, gpus = scorers(lm)
        return ScorerPool(self, replicas, lm.threads_per_replica, gpus, lm.timeout_seconds, lm.max_attempts)

    def open_here(self) -> AsyncLM:
        return InProcessLM(self.load(), self.tokens_per_unit(on_gpu=False))

    def tokens_per_unit(self, on_gpu: bool) -> int:
        """Of one call to a replica."""
        return tokens_per_unit(self.shape, on_gpu, self.tokens_per_batch)
