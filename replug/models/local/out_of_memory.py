"""What is done where memory does not hold a pass: it is halved, and said."""

import logging

import torch

from replug.config.errors import RunError

log = logging.getLogger(__name__)


def report_out_of_memory(num_groups: int, size: int) -> None:
    """Raises RunError for what fewer inputs in a pass would not fix."""
    if num_groups == 1:
        raise RunError(
            f"the LM ran out of memory on a single input of {size} tokens: take shorter texts, a smaller LM or dtype, "
            "or more memory"
        )
    log.warning(
        f"the LM ran out of memory at {size} tokens in one pass; halving, as each time it meets such a pass "
        "(lm.tokens_per_batch sets the size)"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """A CPU's allocator and CUDA's libraries have no error class of their own."""
    signs = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
