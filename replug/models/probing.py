"""Try on a model what its architecture can do, since none of 200 says so.

A probe is a small question to transformers' code, and any error but one says no. That one is memory that is spent: it
says nothing of the architecture.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Found = TypeVar("Found")


def tried(probe: Callable[[], Found], otherwise: Found) -> Found:
    """Return what a probe finds on the model, or `otherwise` where the architecture cannot do what it tries."""
    try:
        return probe()
    except Exception as error:  # foreign code, of 200 architectures, says no by any kind of error
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        log.debug(f"{probe} says no: {type(error).__name__}: {error}")
        return otherwise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory is spent: a CPU's allocator and CUDA's libraries have no error class of their own."""
    signs = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def probe_ids(model: PreTrainedModel) -> list[int]:
    """Return sixteen tokens from all over the vocabulary, whose beginning is often special."""
    size = model.config.get_text_config().vocab_size
    return [size * (i + 1) // 17 for i in range(16)]


def same_direction(a: Tensor, b: Tensor) -> bool:
    """Return whether states are equal up to rounding; what ignores the prefix, or its length, is below 0.95."""
    return bool((torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1) > 0.99).all())
