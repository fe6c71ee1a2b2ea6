"""LMs that compute on our own machines, on replicas of Ray or in this process: a folder, a file or a hub name."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from replug.cluster.layout import scorers
from replug.config.schema import LMConfig
from replug.models.batching import LMShape, tokens_per_unit
from replug.models.black_box_lm import AsyncLM, BlackBoxLM
from replug.models.hardware import DTYPES, default_device, dtype_name
from replug.models.lm_source import InProcessLM, LMSource
from replug.models.packaged import resolve_lm_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from replug.models.scorer_pool import ScorerPool


class LocalSource(LMSource):
    """An `LMSource` for whatever `load` loads. Subclasses are records that travel to actors by pickle."""

    roles = ("score",)
    tokens_per_batch: int | None  # padded tokens in one pass; None for a default by hardware and size
    mark: str  # at the end of the identity: of prompts by another template than the default one

    @property
    def shape(self) -> LMShape:
        """Return the shape of the LM's layers, without loading them."""
        return LMShape()

    @abstractmethod
    def load(self, spread: bool = False) -> BlackBoxLM:
        """Load the LM in this process; `spread` lays its layers over all visible GPUs."""

    def prompted_by(self, mark: str) -> "LocalSource":
        return replace(self, mark=mark)  # type: ignore[type-var]  # subclasses are dataclasses

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        """Do nothing: weights are read when they are loaded."""

    def shipped(self) -> "LocalSource":
        """Return the source as replicas get it."""
        return self

    def open(self, lm: LMConfig) -> AsyncLM:
        return open_pool(lm, self)

    def open_here(self) -> AsyncLM:
        return InProcessLM(self.load(), self.tokens_per_unit(on_gpu=False), self.identity)

    def tokens_per_unit(self, on_gpu: bool) -> int:
        """Return the tokens of one unit."""
        return tokens_per_unit(self.shape, on_gpu, self.tokens_per_batch)


def open_pool(lm: LMConfig, source: LocalSource, second: LocalSource | None = None) -> "ScorerPool":
    """Put an LM to work on replicas by its section as it is laid out, and a second one on the same replicas."""
    from replug.models.scorer_pool import ScorerPool  # imports Ray, which `open_here` does without

    replicas, gpus = scorers(lm)
    also = second.shipped() if second else None
    return ScorerPool(source.shipped(), replicas, None, gpus, lm.timeout_seconds, second=also)


def source(lm: LMConfig) -> "HuggingFaceSource | None":
    """Return the source of local weights. Raises UserError for a path without a model."""
    if lm.path is None:
        return None
    return HuggingFaceSource(
        resolve_lm_path(lm.path),
        dtype_name(lm.dtype.value),
        lm.tokens_per_batch,
    )


@dataclass(frozen=True, slots=True)
class HuggingFaceSource(LocalSource):
    """Weights in a folder, or under a hub name. What reads them takes seconds to import, so methods do it.

    `known_identity` is what the process that starts a run found, so that its replicas need not hash the files.
    """

    path: str
    dtype: str = "float32"
    tokens_per_batch: int | None = None
    known_identity: str | None = None
    mark: str = ""

    @property
    def identity(self) -> str:
        from replug.models.local.weights import lm_identity

        return self.known_identity or lm_identity(self.path, DTYPES[self.dtype]) + self.mark

    @property
    def max_tokens(self) -> int | None:
        from replug.models.model_files import longest_input, read_model_config

        return longest_input(read_model_config(self.path, "lm.path"))

    @property
    def shape(self) -> LMShape:
        from replug.models.model_files import lm_shape, read_model_config

        return lm_shape(read_model_config(self.path, "lm.path"))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from replug.models.model_files import load_lm_tokenizer

        return load_lm_tokenizer(self.path)

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        """Look at the kind of the model and its tokenizer; weights are read when they are loaded."""
        from replug.models.model_files import require_quantizer, require_safetensors

        self.tokenizer()
        require_quantizer(self.path, "lm.path")
        require_safetensors(self.path, "lm.path")

    def load(self, spread: bool = False) -> BlackBoxLM:
        from replug.models.local.hf_lm import HuggingFaceLM

        return HuggingFaceLM(
            self.path,
            DTYPES[self.dtype],
            default_device(),
            self.tokens_per_batch,
            spread,
            self.identity,
        )

    def shipped(self) -> LocalSource:
        return replace(self, known_identity=self.identity)
