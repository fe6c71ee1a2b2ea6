"""Local weights as a backend: a folder, a GGUF file or a hub name in `lm.path`, read by transformers."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM, LocalLM
from replug.models.hardware import DTYPES, default_device, dtype_name
from replug.models.lm_source import LMFiles
from replug.models.local.computing import BY_DEFAULT, Computing
from replug.models.local.local_source import LocalSource
from replug.models.local.weights import HashedFiles, hashed_files, lm_identity
from replug.models.packaged import resolve_lm_path
from replug.models.pass_size import LMShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def source(lm: LMConfig, files: LMFiles) -> "HuggingFaceSource | None":
    """Raises UserError for a path that is no model's."""
    if lm.path is None:
        return None
    computing = Computing(lm.compile, lm.fused, lm.packed)
    return HuggingFaceSource(resolve_lm_path(lm.path), dtype_name(lm.dtype.value), lm.tokens_per_batch, computing)


@dataclass(frozen=True, slots=True)
class HuggingFaceSource(LocalSource):
    """Weights in a folder, or under a hub name. hf_lm.py takes seconds to import, so methods do it.

    `hashed` is what the files held when the run was started, for replicas, which then need not read them twice.
    """

    path: str
    dtype: str = "float32"
    tokens_per_batch: int | None = None
    computing: Computing = BY_DEFAULT
    hashed: HashedFiles | None = None

    @property
    def identity(self) -> str:
        return lm_identity(self.path, DTYPES[self.dtype], self.hashed)

    @property
    def max_tokens(self) -> int | None:
        from replug.models.model_files import read_model_config

        return getattr(read_model_config(self.path, "lm.path").get_text_config(), "max_position_embeddings", None)

    @property
    def shape(self) -> LMShape:
        from replug.models.model_files import lm_shape, read_model_config

        return lm_shape(read_model_config(self.path, "lm.path"))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from replug.models.model_files import load_lm_tokenizer

        return load_lm_tokenizer(self.path)

    def connect(self) -> None:
        """Look at the kind of the model and at its tokenizer; weights are read when they are loaded."""
        self.tokenizer()

    def load(self, spread: bool = False) -> LocalLM:
        from replug.models.local.hf_lm import HuggingFaceLM

        options = (default_device(), self.tokens_per_batch, spread, self.identity, self.computing)
        return HuggingFaceLM(self.path, DTYPES[self.dtype], *options)

    def open(self, lm: LMConfig) -> AsyncLM:
        return LocalSource.open(replace(self, hashed=hashed_files(self.path, self.hashed)), lm)
