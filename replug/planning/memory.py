"""Estimate the bytes that actors hold on a GPU: weights, activations, optimizer state, index vectors. Pure.

Training is counted by tensor in the layers of transformers' BERT and Qwen3 with fused attention, and tested against a
step on fake tensors (tests/planning/test_memory.py). Under autocast norms and sums stay in float32, and each linear
layer keeps a copy of its input in 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from replug.cluster.gpu_shares import Sizes
from replug.cluster.packing import USABLE
from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.schema import Config, LMConfig
from replug.index_workers.kinds import SEARCH_BYTES
from replug.models.batching import ENCODER_TOKENS, ENCODER_TOKENS_WITH_GRADIENT, LMShape, tokens_per_pass
from replug.planning.model_sizes import ModelSize, lm_size, retriever_size
from replug.planning.workload import Shape, index_size, searched_width, shape_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4  # in float32
LEARNING_BYTES = GRADIENT_BYTES + 8  # and Adam's two moments
POSITIONS_PER_PRODUCT = 256  # given to the output layer at once (models/local/output_layer.py)
TOKENS_PER_PASS_GPU, TOKENS_PER_PASS_WITH_GRADIENT = ENCODER_TOKENS["cuda"], ENCODER_TOKENS_WITH_GRADIENT["cuda"]
ROW_BYTES = 4  # of a unit of width in what goes into a layer, which is float32 under autocast too
PASSING_BYTES = 20  # that a pass has in hand in its last layer and does not keep, for each token and unit of width
UNCOUNTED = 1.003  # biases and norms, which a ModelSize leaves out
ADAPTED_LAYERS = 2  # linear layers of a layer that peft adapts: query and value

Resolve = Callable[[str], str]  # what `auto` and `bf16_mixed` come to on the hardware


def resolve_dtype(name: str, has_bfloat16: bool) -> str:
    """Return the precision that `auto` and `bf16_mixed` come to."""
    if name == "auto":
        return "bfloat16" if has_bfloat16 else "float32"
    return "bfloat16" if name == "bf16_mixed" else name


def run_sizes(config: Config, num_documents: int | None, has_bfloat16: bool) -> Sizes:
    """Return what the actors of a run hold on GPUs. A size that no table and no file tells is None."""
    lm = known(lm_size, config.lm.path) if config.lm.path else None
    retriever = known(retriever_size, config.retriever) if config.retriever.path else None
    return sizes_of(config, retriever, lm, num_documents, partial(resolve_dtype, has_bfloat16=has_bfloat16))


def known(size_of: Callable[[Any], ModelSize], model: Any) -> ModelSize | None:
    """Return the size of a model; None for one that no table and no file tells."""
    try:
        return size_of(model)
    except UserError:
        return None


def sizes_of(
    config: Config, retriever: ModelSize | None, lm: ModelSize | None, num_documents: int | None, resolve: Resolve
) -> Sizes:
    """Return what the actors hold on GPUs; None stands for an unknown size."""
    scoring = scoring_bytes(config.lm, lm, resolve) if lm else None
    if retriever is None:
        return Sizes(scoring=scoring)
    trained, vectors = trained_part(config, retriever), None
    shape, dtype = shape_of(config, num_documents or 1), resolve(config.train.precision.value)

    def rank_bytes(ranks: int) -> float:
        return train_bytes(retriever, shape, ranks, dtype, config.train.gradient_checkpointing, trained)

    if num_documents:
        width = searched_width(config, retriever.dim)
        try:
            vectors = num_documents * index_size(config, width, num_documents).bytes_per_vector
        except UserError:  # a factory string whose bytes only FAISS knows
            vectors = None
    return Sizes(
        vectors=vectors,
        search=SEARCH_BYTES,
        embedding=embedding_bytes(config, retriever, resolve),
        scoring=scoring,
        training=rank_bytes,
    )


def pass_bytes(model: ModelSize, num_tokens: int, dtype: str) -> float:
    """Return the activations of a forward pass without gradient: the widest tensors of one layer, twice."""
    return float(num_tokens * (2 * model.intermediate + 6 * model.hidden) * DTYPE_BYTES[dtype])


def score_bytes(lm: ModelSize, num_tokens: int, dtype: str) -> float:
    """Return the bytes of a replica: weights, a pass of `num_tokens`, and logits of some positions."""
    logits = POSITIONS_PER_PRODUCT * lm.vocabulary * (DTYPE_BYTES[dtype] + 8.0)
    return lm.parameters * DTYPE_BYTES[dtype] + pass_bytes(lm, num_tokens, dtype) + logits


def scoring_bytes(keys: LMConfig, lm: ModelSize, resolve: Resolve) -> float:
    """Return the bytes of one LM with the keys of `lm`, over all its GPUs."""
    tokens = tokens_per_pass(LMShape(lm.layers, lm.hidden), True, keys.tokens_per_batch)
    return score_bytes(lm, tokens, resolve(keys.dtype.value))


def embedding_bytes(config: Config, retriever: ModelSize, resolve: Resolve) -> float:
    """Return the bytes of a builder: its encoder and one pass."""
    tokens, dtype = config.index.tokens_per_batch or TOKENS_PER_PASS_GPU, resolve(config.index.dtype.value)
    return retriever.parameters * DTYPE_BYTES[dtype] + pass_bytes(retriever, tokens, dtype)


def gpus_for(num_bytes: float, memory_gb: float) -> int:
    """Return the GPUs that hold so many bytes together."""
    return max(1, -int(-num_bytes // (USABLE * memory_gb * 1e9)))


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The weights that a training rank holds, and those that learn."""

    parameters: int
    learning: int
    adapted: bool = False  # adapters learn, the other weights do not
    side: TrainedSide = TrainedSide.both

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights, gradients and moments."""
        return WEIGHT_BYTES * self.parameters + LEARNING_BYTES * self.learning

    @property
    def flop_factor(self) -> float:
        """Return the FLOP of a step in forward passes."""
        return 2 if self.adapted else 3


def whole(retriever: ModelSize) -> TrainedPart:
    """Return the trained part if all weights learn."""
    return TrainedPart(retriever.parameters, retriever.parameters)


def trained_part(config: Config, retriever: ModelSize) -> TrainedPart:
    """Return what of the retriever learns: all of it, or adapters alone (`lora`).

    Adapters of a linear layer are rank * (in + out) weights.
    """
    rank = config.lora.rank
    # Beside one encoder that learns as that of queries stands the same one for documents.
    is_copied = config.retriever.train is TrainedSide.query and config.retriever.query_path is None
    part = TrainedPart(
        retriever.parameters * (2 if is_copied else 1),
        retriever.parameters,
        side=config.retriever.train,
    )
    if rank is None:
        return part
    width = retriever.attention_width
    adapters = retriever.layers * rank * (2 * retriever.hidden + width + (retriever.kv_width or width))
    return replace(part, parameters=part.parameters + adapters, learning=adapters, adapted=True)


def train_bytes(
    retriever: ModelSize, shape: Shape, ranks: int, dtype: str, checkpointed: bool, part: TrainedPart
) -> float:
    """Return what one rank holds at most in a step: it takes its share of the queries with their documents.

    The most is held after the forward pass, where layers are computed again, or while weights change; Adam then has as
    much in hand as the weights that learn. Where chunks are asked for, activations are of one chunk, a text at least;
    beside them all vectors are kept, which are little.
    """
    hidden, size = retriever.hidden, DTYPE_BYTES[dtype]
    is_chunked = shape.chunk_tokens is not None
    queries = shape.batch_size / (ranks * shape.micro_batches) * shape.encoded_query  # tokens of a rank at a time
    documents = queries / shape.encoded_query * shape.k * shape.encoded_document
    of_sides = {TrainedSide.query: (queries,), TrainedSide.documents: (documents,)}
    tokens = of_sides.get(part.side, (queries, documents))  # with gradient
    in_pass = max(shape.chunk_tokens or TOKENS_PER_PASS_WITH_GRADIENT, shape.longest)
    in_parts = is_chunked or shape.micro_batches > 1
    gradients = float(GRADIENT_BYTES * part.learning)
    # Autocast copies the weights of trained layers once in a step where they learn, once in each pass where not.
    copied = 0.0 if dtype == "float32" else size * retriever.layer_parameters
    if checkpointed or is_chunked or not part.adapted:
        num_copies = float(not (checkpointed and part.adapted))
    else:
        num_copies = sum(-(-number // in_pass) for number in tokens)

    # A pass of documents has tensors in hand that no layer keeps.
    last = min(in_pass, documents)
    if part.side is TrainedSide.query:  # documents have no gradient; attention may have more in hand
        passing = max(16 * hidden + 2 * size * retriever.intermediate, 28 * hidden) * last
    else:
        if not is_chunked:
            last = documents % in_pass or last
        in_hand = PASSING_BYTES * hidden
        if checkpointed:
            in_hand += 2 * retriever.intermediate
        elif part.adapted:
            in_hand = (16 + 6 * size) * hidden
        passing = in_hand * last
    most = num_copies * copied + passing
    if checkpointed:  # a layer is computed again; gradients are not there yet, unless of an earlier part
        layer = layer_bytes(retriever, dtype, shape.longest, part) + (8 * size + 12 * part.adapted) * hidden
        again = layer * min(in_pass, max(tokens)) + copied / retriever.layers - (0.0 if in_parts else gradients)
        most = max(most, again)

    one_token = token_bytes(retriever, dtype, shape.longest, part, checkpointed=checkpointed)
    kept = one_token * (min(in_pass, max(tokens)) if is_chunked else sum(tokens))
    waiting = 0.0
    if is_chunked and not part.adapted:  # gradients wait in 16 bits: beside earlier parts', or in place of float32
        waiting = copied * (1 if shape.micro_batches > 1 else -1)
    sums = gradients if ranks > 1 else 0.0  # DDP's own
    return UNCOUNTED * (part.num_bytes + sums) + max(gradients, kept + waiting + most)


def layer_bytes(model: ModelSize, dtype: str, length: int, part: TrainedPart) -> float:
    """Return what one layer keeps of a token, in texts of so many tokens, for the backward pass."""
    width, keys, size = model.attention_width, model.kv_width or model.attention_width, DTYPE_BYTES[dtype]
    fused = width / 16 + size * length  # sums of the softmax in float32, for heads of 64; the mask of padding
    if model.gated:
        attention, norms = (4 + 5 * size) * width + (4 + size) * keys, 27 * model.hidden
        return fused + attention + norms + 4 * size * model.intermediate
    attention, norms = 2 * size * (width + keys), 8 * model.hidden + 16
    if part.adapted:
        inputs = ADAPTED_LAYERS if size == 2 else 1
        return fused + attention + norms + size * (inputs * model.hidden + model.intermediate)
    return fused + attention + norms + 8 * model.hidden + 2 * size * model.intermediate


def token_bytes(model: ModelSize, dtype: str, length: int, part: TrainedPart, checkpointed: bool) -> float:
    """Return what all layers keep of a token, or with gradient checkpointing their inputs; with the embeddings."""
    row = ROW_BYTES * model.hidden
    if checkpointed:
        return row * (model.layers + (2 if part.adapted else 1)) + length
    embeddings = row if not part.adapted else 0
    return model.layers * layer_bytes(model, dtype, length, part) + embeddings + length
