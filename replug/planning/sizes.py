"""Bytes that the actors of a configuration hold on GPUs, for the layout: of a plan's models, or of a run's."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from replug.cluster.gpu_shares import Sizes
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.models.pass_size import LMShape, tokens_per_pass
from replug.planning import memory
from replug.planning.model_sizes import ModelSize, lm_size, retriever_size
from replug.planning.trained import TrainedPart, trained_part
from replug.planning.training_memory import train_bytes
from replug.planning.workload import index_size, searched_width, shape_of

# Tokens of an encoder's forward pass on a GPU where no key says otherwise (models/hardware.py).
TOKENS_PER_PASS_GPU = 32_768
Named = TypeVar("Named")
Resolve = Callable[[str], str]  # what `auto` and `bf16_mixed` come to on the hardware


def run_sizes(config: Config, num_documents: int | None, has_bfloat16: bool) -> Sizes:
    """Of a run on GPUs. What no table and no file on this machine tells stays unknown."""

    def resolve(name: str) -> str:
        if name == "auto":
            return "bfloat16" if has_bfloat16 else "float32"
        return "bfloat16" if name == "bf16_mixed" else name

    lm = _known(lm_size, config.lm.path) if config.lm.path else None
    retriever = _known(retriever_size, config.retriever) if config.retriever.path else None
    return sizes_of(config, retriever, lm, num_documents, resolve)


def sizes_of(
    config: Config, retriever: ModelSize | None, lm: ModelSize | None, num_documents: int | None, resolve: Resolve
) -> Sizes:
    """What is None is not known."""
    scoring = scoring_bytes(config, lm, resolve) if lm else None
    if retriever is None:
        return Sizes(scoring=scoring)
    tokens = config.index.tokens_per_batch or TOKENS_PER_PASS_GPU
    shape = shape_of(config, num_documents or 1)
    step: dict[str, Any] = {
        "dtype": resolve(config.train.precision.value),
        "checkpointed": config.train.gradient_checkpointing,
        "trained": known_trained_part(config, retriever),
    }
    return Sizes(
        vectors=_vector_bytes(config, searched_width(config, retriever.dim), num_documents) if num_documents else None,
        embedding=memory.embed_bytes(retriever, tokens, resolve(config.index.dtype.value)),
        scoring=scoring,
        training=partial(train_bytes, retriever, shape, **step) if step["trained"] else None,
    )


def known_trained_part(config: Config, retriever: ModelSize) -> TrainedPart | None:
    """What learns; None where adapters are of a size that is not known here."""
    try:
        return trained_part(config, retriever)
    except UserError:
        return None


def scoring_bytes(config: Config, lm: ModelSize, resolve: Resolve) -> float:
    """Of one LM, over all its GPUs."""
    tokens = tokens_per_pass(LMShape(lm.layers, lm.hidden), True, config.lm.tokens_per_batch)
    return memory.score_bytes(lm, tokens, resolve(config.lm.dtype.value))


def _vector_bytes(config: Config, dim: int, num_documents: int) -> float | None:
    try:
        return num_documents * index_size(config, dim, num_documents).bytes_per_vector
    except UserError:  # a factory string whose bytes only FAISS knows
        return None


def _known(size: Callable[[Named], ModelSize], of: Named) -> ModelSize | None:
    try:
        return size(of)
    except UserError:
        return None
