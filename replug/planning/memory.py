"""Memory of one device by role, in bytes: weights, a pass, logits, index vectors. Pure.

That of training is in `training_memory`.
"""

from dataclasses import dataclass

from replug.cluster.packing import USABLE
from replug.planning.model_sizes import ModelSize

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POSITIONS_PER_PRODUCT = 256  # given to the output layer at once (models/local/logprobs.py)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """GB of one device. `search` is shared by all devices that hold vectors; `train_checkpointed` recomputes layers."""

    score: float
    embed: float
    train: float
    train_checkpointed: float
    search: float


def pass_bytes(model: ModelSize, num_tokens: int, dtype: str) -> float:
    """Activations of a forward pass without gradient: one layer at a time, its widest tensors twice."""
    per_token = 2 * model.intermediate + 6 * model.hidden
    return float(num_tokens * per_token * DTYPE_BYTES[dtype])


def score_bytes(lm: ModelSize, tokens_per_pass: int, dtype: str) -> float:
    """Of one replica: weights, one pass without a cache of keys and values, some positions' logits, also in float32."""
    logits = POSITIONS_PER_PRODUCT * lm.vocabulary * (DTYPE_BYTES[dtype] + 8.0)
    return lm.parameters * DTYPE_BYTES[dtype] + pass_bytes(lm, tokens_per_pass, dtype) + logits


def embed_bytes(retriever: ModelSize, tokens_per_pass: int, dtype: str) -> float:
    return retriever.parameters * DTYPE_BYTES[dtype] + pass_bytes(retriever, tokens_per_pass, dtype)


def search_bytes(num_documents: int, bytes_per_vector: float, two_versions: bool) -> float:
    """All vectors, and those of the next version beside them while it is swapped in."""
    return num_documents * bytes_per_vector * (2 if two_versions else 1)


def gpus_for(num_bytes: float, memory_gb: float) -> int:
    """Devices that hold so many bytes together; 1 where the memory is the host's own and is not checked."""
    if memory_gb == 0:
        return 1
    return max(1, -int(-num_bytes // (USABLE * memory_gb * 1e9)))
