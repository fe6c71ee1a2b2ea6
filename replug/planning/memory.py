"""Estimate the bytes that a run holds: on GPUs, in a node's memory, and on disk. Pure.

Training is counted by the tensors that the layers of transformers' BERT and Qwen3 keep with fused attention, and tested
against a step on fake tensors (tests/planning/test_memory.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from replug.cluster.layout import SCORER, VERSIONS, Layout, Sizes
from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.paths import names_store
from replug.config.schema import Config, LMConfig
from replug.index_workers.kinds import SEARCH_BYTES, bytes_per_vector, num_lists, resolve_kind
from replug.models.batching import ENCODER_TOKENS, ENCODER_TOKENS_WITH_GRADIENT, tokens_per_pass, weights_of_layers
from replug.planning.model_sizes import BERT_BASE, ModelSize, encoder_size, lm_size, retriever_size
from replug.planning.stages import Counts, Lengths, lengths, num_pairs, refreshes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32, FLOAT16 = 4, 2
POSITIONS_PER_PRODUCT = 256  # given to the output layer at once (models/local/output_layer.py)
# Bytes of a token in a layer, for each unit of width, beside the inputs of matrices: norms, and sums in float32. Gated
# layers keep the inputs and outputs of their matrices; layers with adapters need no inputs of frozen matrices.
NORM_BYTES, GATED_NORM_BYTES, ADAPTED_SHARE = 16, 27, 0.7
PASSING_BYTES = 20  # temporary in a pass, for each token and unit of width

TEXT_BYTES_PER_TOKEN = 4.0  # of English prose; program code has about 3
NAME_BYTES = 60.0  # a row's id, domain and source together
OFFSET_BYTES, TOKEN_END_BYTES = 4, 8  # where a string of a row ends, and a document's token ids
SMALL_VOCABULARY = 1 << 16  # token ids below it take two bytes, others four
KEPT_CHECKPOINTS = 2  # while training
SCORE_BYTES = 45  # a row of the cache: key, sum and counts, in pages that random keys fill to two thirds


def resolve_dtype(name: str, has_bfloat16: bool) -> str:
    """Return the precision of a name; resolves `auto` and `bf16_mixed`."""
    if name == "auto":
        return "bfloat16" if has_bfloat16 else "float32"
    return "bfloat16" if name == "bf16_mixed" else name


def known(size_of: Callable[[Any], ModelSize], model: Any) -> ModelSize | None:
    """Return the size of a model; None if neither a table nor a file has it."""
    try:
        return size_of(model)
    except UserError:
        return None


def retriever_or_base(config: Config) -> ModelSize:
    """Return the retriever's size; BERT-base's if it is not known."""
    return known(retriever_size, config.retriever) or encoder_size(BERT_BASE)


# On GPUs ----------------------------------------------------------------------------------------------------------


def run_sizes(config: Config, num_documents: int | None, has_bfloat16: bool) -> Sizes:
    """Return the bytes of a run's actors on GPUs. None means a model of unknown size."""
    lm = known(lm_size, config.lm.path) if config.lm.path else None
    retriever = known(retriever_size, config.retriever) if config.retriever.path else None
    scoring = scoring_bytes(config.lm, lm, has_bfloat16) if lm else None
    if retriever is None:
        return Sizes(scoring=scoring)
    return Sizes(
        vectors=_vector_bytes(config, retriever, num_documents) if num_documents else None,
        search=SEARCH_BYTES,
        embedding=embedding_bytes(config, retriever, has_bfloat16),
        scoring=scoring,
        training=partial(train_bytes, config, retriever, has_bfloat16=has_bfloat16),
    )


def pass_bytes(model: ModelSize, num_tokens: int, dtype: str) -> float:
    """Return the activations of a forward pass without gradient: the widest tensors of one layer, twice."""
    return float(num_tokens * (2 * model.intermediate + 6 * model.hidden) * DTYPE_BYTES[dtype])


def score_bytes(lm: ModelSize, num_tokens: int, dtype: str) -> float:
    """Return the bytes of a replica: weights, a pass of `num_tokens`, and logits of some positions."""
    logits = POSITIONS_PER_PRODUCT * lm.vocabulary * (DTYPE_BYTES[dtype] + 8.0)
    return lm.parameters * DTYPE_BYTES[dtype] + pass_bytes(lm, num_tokens, dtype) + logits


def scoring_bytes(keys: LMConfig, lm: ModelSize, has_bfloat16: bool) -> float:
    """Return the bytes of one LM with the keys of `lm`, over all its GPUs."""
    tokens = tokens_per_pass(weights_of_layers(lm.layers, lm.hidden), True, keys.tokens_per_batch)
    return score_bytes(lm, tokens, resolve_dtype(keys.dtype.value, has_bfloat16))


def embedding_bytes(config: Config, retriever: ModelSize, has_bfloat16: bool) -> float:
    """Return the bytes of a builder: its encoder and one pass."""
    dtype = resolve_dtype(config.index.dtype.value, has_bfloat16)
    tokens = ENCODER_TOKENS["cuda"]
    return retriever.parameters * DTYPE_BYTES[dtype] + pass_bytes(retriever, tokens, dtype)


def trained_weights(config: Config, retriever: ModelSize) -> tuple[int, int]:
    """Return the weights that a training rank holds, and the trained weights: all, or adapters alone (`lora`)."""
    is_copied = config.retriever.train is TrainedSide.query and config.retriever.query_path is None
    held = retriever.parameters * (2 if is_copied else 1)
    if config.lora.rank is None:
        return held, retriever.parameters
    adapters = 4 * retriever.layers * config.lora.rank * retriever.hidden  # of queries and values
    return held + adapters, adapters


def state_bytes(config: Config, retriever: ModelSize) -> int:
    """Return the bytes of weights, and of gradients and Adam's two moments of trained weights, in float32."""
    held, learning = trained_weights(config, retriever)
    return FLOAT32 * (held + 3 * learning)


def train_bytes(config: Config, retriever: ModelSize, ranks: int, has_bfloat16: bool) -> float:
    """Return the peak bytes of one rank in a step, for its share of the queries with their documents.

    With `train.chunk_tokens` activations are of one chunk, a text at least; the vectors of all texts are small.
    """
    train, size, learning = config.train, lengths(config), trained_weights(config, retriever)[1]
    dtype = resolve_dtype(train.precision.value, has_bfloat16)
    in_pass = max(train.chunk_tokens or ENCODER_TOKENS_WITH_GRADIENT["cuda"], size.encoded_document)
    queries = train.batch_size / (ranks * train.micro_batches)
    tokens = _tokens_with_gradient(config, size, queries)
    at_once = min(in_pass, tokens)
    one_layer = layer_bytes(retriever, dtype, size.encoded_document, adapted=config.lora.rank is not None)
    inputs = FLOAT32 * retriever.hidden  # of a layer, which is float32 under autocast too
    kept = (at_once if train.chunk_tokens else tokens) * (retriever.layers * one_layer + inputs)
    copied = 0 if dtype == "float32" else DTYPE_BYTES[dtype] * retriever.layer_parameters  # by autocast
    passing = PASSING_BYTES * retriever.hidden * min(in_pass, queries * config.retrieve.k * size.encoded_document)
    sums = FLOAT32 * learning if ranks > 1 else 0  # DDP's own
    return state_bytes(config, retriever) + sums + max(FLOAT32 * learning, kept + copied + passing)


def layer_bytes(model: ModelSize, dtype: str, length: int, adapted: bool = False) -> float:
    """Return the bytes that one layer keeps of a token, in texts of `length` tokens, for the backward pass.

    A matrix keeps one number per row for each token: its weights divided by the width.
    """
    size, numbers = DTYPE_BYTES[dtype], model.layer_parameters / model.layers / model.hidden
    mask = size * length
    if model.gated:
        return 2 * size * numbers + GATED_NORM_BYTES * model.hidden + mask
    return (size * numbers + NORM_BYTES * model.hidden) * (ADAPTED_SHARE if adapted else 1) + mask


def _tokens_with_gradient(config: Config, size: Lengths, queries: float) -> float:
    documents = queries * config.retrieve.k * size.encoded_document
    of_sides = {TrainedSide.query: queries * size.encoded_query, TrainedSide.documents: documents}
    return of_sides.get(config.retriever.train, queries * size.encoded_query + documents)


def _vector_bytes(config: Config, retriever: ModelSize, num_documents: int) -> float | None:
    """Return the bytes of one version of the vectors as it is searched; None if only FAISS knows them.

    A vector store holds its own.
    """
    if names_store(config.data.corpus):
        return 0.0
    dim, index = config.index.dims or retriever.dim, config.index
    factory = resolve_kind(index.kind, dim, num_documents, index.nprobe).factory
    each = FLOAT16 * dim if factory is None else bytes_per_vector(factory, dim, num_documents)
    return None if each is None else num_documents * each


# In a node's memory -----------------------------------------------------------------------------------------------


def host_bytes(layout: Layout, num_documents: int, has_bfloat16: bool, num_nodes: int = 1) -> float:
    """Return the bytes on a node of the trainer's weights, of LMs on processors and of vectors that no GPU holds.

    Two versions of the vectors are in memory during a swap.
    """
    config, index = layout.config, layout.index
    retriever = retriever_or_base(config)
    num_scorers = sum(actor.key == SCORER and not actor.gpus for actor in layout.actors)
    lm = known(lm_size, config.lm.path) if config.lm.path and num_scorers else None
    dtype = resolve_dtype(config.lm.dtype.value, has_bfloat16)
    weights = num_scorers * lm.parameters * DTYPE_BYTES[dtype] if lm else 0
    vectors = 0.0
    if not index.search_on_gpu:
        known_bytes = _vector_bytes(config, retriever, num_documents or 1)
        largest = num_documents * FLOAT32 * (config.index.dims or retriever.dim)
        vectors = VERSIONS * (largest if known_bytes is None else known_bytes)
    return state_bytes(config, retriever) + weights + vectors / min(num_nodes, index.num_shards)


# On disk ----------------------------------------------------------------------------------------------------------


def disk_bytes(config: Config, counts: Counts) -> dict[str, float]:
    """Return the largest bytes of a run directory by part; 0 for a set that is prepared elsewhere."""
    retriever = retriever_or_base(config)
    versions = most_versions(config) + bool(counts.dev)  # the chosen weights may have another index
    return {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(config, counts, retriever.vocabulary),
        "index_versions": versions * version_bytes(config, counts.documents, retriever),
        "checkpoints": float((KEPT_CHECKPOINTS + 1) * FLOAT32 * 3 * trained_weights(config, retriever)[1]),
        "scores": float(SCORE_BYTES * num_pairs(config, counts)),
    }


def prepared_bytes(config: Config, counts: Counts, vocabulary: int) -> float:
    """Return the bytes of documents with their token ids and of training texts, by the lengths of the configuration."""
    size = lengths(config)
    ids = size.encoded_document * (FLOAT16 if vocabulary < SMALL_VOCABULARY else FLOAT32) + TOKEN_END_BYTES
    document = TEXT_BYTES_PER_TOKEN * size.document + NAME_BYTES + 4 * OFFSET_BYTES + ids
    example = TEXT_BYTES_PER_TOKEN * (size.context + size.continuation) + NAME_BYTES + 6 * OFFSET_BYTES
    return counts.documents * document + counts.queries * example


def version_bytes(config: Config, num_documents: int, retriever: ModelSize) -> float:
    """Return the bytes of an index version: its encoder, its float16 vectors, and a lossy kind's codes and centroids.

    Centroids are in the quantizer's file and in that of every shard.
    """
    encoder = float(FLOAT32 * retriever.parameters)
    if names_store(config.data.corpus):
        return encoder
    dim, index = config.index.dims or retriever.dim, config.index
    factory = resolve_kind(index.kind, dim, num_documents or 1, index.nprobe).factory
    codes = (_vector_bytes(config, retriever, num_documents or 1) or 0.0) if factory else 0.0
    centroids = ((index.num_shards or 1) + 1) * num_lists(factory or "") * FLOAT32 * dim
    return encoder + FLOAT16 * dim * num_documents + codes + centroids


def most_versions(config: Config) -> int:
    """Return the most index versions on disk at once; old versions are deleted when a checkpoint is written.

    They are the live version, the previous, the version in progress, and one for each refresh that begins within the
    steps of the kept checkpoints and the lag.
    """
    policy = refreshes(config)
    span = KEPT_CHECKPOINTS * config.checkpoint.every_steps + policy.lag_steps
    return min(policy.num_starts + 2, 3 + span // policy.every_steps)
