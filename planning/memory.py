"""Memory of one device by role, in bytes: weights, optimizer, activations, logits, index vectors. Pure.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198): 34 bytes for each token, layer and unit of width in
16 bits, without the attention matrix, which fused attention does not keep.
"""

from dataclasses import dataclass

from replug.cluster.packing import USABLE
from replug.planning.model_sizes import ModelSize
from replug.planning.trained import TrainedPart, whole
from replug.planning.workload import Shape

POSITIONS_PER_PRODUCT = 256  # given to the output layer at once (models/local/logprobs.py)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def train_bytes(
    retriever: ModelSize, shape: Shape, ranks: int, dtype: str, checkpointed: bool, trained: TrainedPart | None = None
) -> float:
    """Of one rank, which takes its share of the batch's queries with their documents, in so many parts.

    Activations are of one chunk where chunks are asked for, a text at least; beside them all vectors are kept, which
    are little. `trained` is what of the retriever learns, None: all. Frozen layers below it keep no activations.
    """
    part = trained or whole(retriever)
    tokens = (
        shape.step.batch_size
        / (ranks * shape.step.micro_batches)
        * (shape.lengths.context + shape.step.k * shape.lengths.document)
    )
    if shape.step.chunk_tokens is not None:
        longest = max(shape.lengths.context, shape.lengths.document)
        tokens = min(tokens, max(shape.step.chunk_tokens, longest))
    layer = part.activation_bytes * retriever.hidden * DTYPE_BYTES[dtype] / 2
    kept = 2.0 * DTYPE_BYTES[dtype] * retriever.hidden  # a layer's input, in the pass and in float32
    layers = retriever.layers * part.layers_share
    activations = tokens * (layers * kept + layer if checkpointed else layers * layer)
    return part.num_bytes + activations


def search_bytes(num_documents: int, bytes_per_vector: float, two_versions: bool) -> float:
    """All vectors, and those of the next version beside them while it is swapped in."""
    return num_documents * bytes_per_vector * (2 if two_versions else 1)


def gpus_for(num_bytes: float, memory_gb: float) -> int:
    """Devices that hold so many bytes together; 1 where the memory is the host's own and is not checked."""
    if memory_gb == 0:
        return 1
    return max(1, -int(-num_bytes // (USABLE * memory_gb * 1e9)))
