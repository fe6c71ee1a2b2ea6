"""Count what a run computes and stores: tokens, FLOP, bytes of its index and on disk. Pure but for `count_documents`.

Texts fill their examples, a document found by several queries counts for each, and a token of the retriever is one of
the LM; the retriever adds its special tokens and pads as the encoder does. Tests compare the bytes on disk with the
files that the stores write.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from replug.cluster.layout import index_actors
from replug.config.choices import Rerank, TrainedSide
from replug.config.errors import UserError
from replug.config.refresh_policy import RefreshPolicy, Start, refresh_policy
from replug.config.rules import CONTEXT, DOCUMENT
from replug.config.schema import Config, LMConfig, RetrieverConfig
from replug.data import rows
from replug.index_workers.build_plan import rows_per_file
from replug.index_workers.kinds import IndexKind, bytes_per_vector, num_lists, resolve_kind
from replug.models.batching import padded_length
from replug.planning.model_sizes import ModelSize

FLOAT32, FLOAT16 = 4, 2
ADAM_STATES = 2  # first and second moment, as large as the weights
TEXT_BYTES_PER_TOKEN = 4.0  # of English prose; program code has about 3
NAME_BYTES = 60.0  # a row's id, domain and source together
OFFSET_BYTES = 4  # where a string of a row ends
TOKEN_END_BYTES = 8  # where a document's token ids end
SPECIAL_TOKENS = 2  # the retriever's, round a text's own
LONGEST = 512  # tokens that most encoders read
SMALL_VOCABULARY = 1 << 16  # token ids below it take two bytes, others four
FILE_BYTES = 350  # beside the vectors in a file: header, mark, entry in the manifest
KEPT_CHECKPOINTS = 2  # train/checkpoints.py
CHAT_TOKENS = 30  # that a chat template writes round a message: 10 of ChatML, 40 of Llama 3's
SCORE_BYTES = 45  # a row of the cache: key, sum and counts, in pages that random keys fill to two thirds


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a configuration that cost something; lengths of texts are in tokens.

    The LM reads a `document`, a `context` and a `continuation`. The encoder computes `encoded_document` tokens for a
    document and `encoded_query` for a context. After training the LM measures `heldout` texts by every method with
    `heldout_k` documents; before training and at each refresh it measures `num_dev` development texts.
    """

    batch_size: int
    k: int
    depth: int  # batches scored ahead
    micro_batches: int
    chunk_tokens: int | None
    context: int
    continuation: int
    document: int
    encoded_query: int
    encoded_document: int
    num_documents: int
    num_queries: int
    refresh: RefreshPolicy
    checkpoint_every: int
    heldout: int = 0
    heldout_k: int = 1
    num_dev: int = 0
    template: int = 0

    @property
    def pairs(self) -> int:
        """Pairs that the LM scores in a step."""
        return self.batch_size * self.k

    @property
    def pair(self) -> int:
        """Tokens of a pair."""
        return self.document + self.context + self.continuation + self.template

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the retriever encodes."""
        return max(self.encoded_query, self.encoded_document)

    @property
    def steps(self) -> int:
        return self.refresh.max_steps

    @property
    def num_builds(self) -> int:
        """Builds of the index: one before training, the refreshes, one after."""
        return self.refresh.num_starts + 2


def shape_of(config: Config, num_documents: int | None = None, device: str = "cuda") -> Shape:
    """Return the shape of a run on GPUs, or on `cpu`. Counts the documents where `num_documents` is None."""
    train, data, evaluate, there = config.train, config.data, config.evaluate, config.data.num_heldout
    document, retriever = data.document_tokens or data.context_tokens, config.retriever
    return Shape(
        batch_size=train.batch_size,
        k=config.retrieve.k,
        depth=train.pipeline_depth,
        micro_batches=train.micro_batches,
        chunk_tokens=train.chunk_tokens,
        context=data.context_tokens,
        continuation=data.context_tokens,
        document=document,
        encoded_query=encoded_tokens(data.context_tokens, retriever, retriever.query_prompt, device),
        encoded_document=encoded_tokens(document, retriever, retriever.document_prompt, device),
        num_documents=num_documents or count_documents(config),
        num_queries=data.num_queries,
        refresh=refresh_policy(config.refresh, train.max_steps, config.retriever.train is not TrainedSide.query),
        checkpoint_every=config.checkpoint.every_steps,
        heldout=there if evaluate.max_examples is None else min(evaluate.max_examples, there),
        heldout_k=evaluate.k,
        num_dev=data.num_dev,
        template=template_tokens(config.lm),
    )


def encoded_tokens(length: int, keys: RetrieverConfig, prompt: str | None = None, device: str = "cuda") -> int:
    """Return the tokens that the encoder computes for a text of `length` tokens, by the encoder's own rule."""
    most = keys.max_tokens or LONGEST
    return padded_length(min(length + SPECIAL_TOKENS + _tokens_in(prompt or ""), most), most, device)


def template_tokens(lm: LMConfig) -> int:
    """Return about how many tokens `lm.prompt` and `lm.chat` add to a document and a context."""
    return _tokens_in((lm.prompt or "").replace(DOCUMENT, "").replace(CONTEXT, "")) + CHAT_TOKENS * lm.chat


def _tokens_in(text: str) -> int:
    return math.ceil(len(text.encode()) / TEXT_BYTES_PER_TOKEN)


def count_documents(config: Config) -> int:
    """Return the documents of the prepared set, of the corpus file, or data.num_documents. Raises UserError without."""
    data = config.data
    for folder in (data.prepared, data.out, f"{config.run_dir}/data"):
        manifest = Path(folder).expanduser() / "manifest.json" if folder else None
        if manifest is not None and manifest.is_file():
            return int(json.loads(manifest.read_text())["counts"]["documents"])
    if data.corpus and Path(data.corpus).expanduser().exists():
        return rows.count_documents(data.corpus, data.fields)
    if data.num_documents is None:
        raise UserError(
            "data.num_documents is not set and no corpus or prepared set is there to count; expected the number of "
            "documents, as data.num_documents=36000000 or --documents 36000000"
        )
    return data.num_documents


def searched_width(config: Config, width: int) -> int:
    """Return the dimensions that are stored and searched, of the `width` that the retriever gives."""
    dims = config.index.dims
    if dims is not None and dims > width:
        raise UserError(f"index.dims is {dims}, but the retriever's vectors have {width} numbers; expected no more")
    return dims or width


@dataclass(frozen=True, slots=True)
class Workload:
    """FLOP of a pair scored, a document embedded, a step trained, a batch of queries encoded, a batch searched."""

    pair: float
    document: float
    train_step: float
    encode_batch: float
    search_batch: float


def work_of(
    shape: Shape,
    retriever: ModelSize,
    lm: ModelSize,
    probed_share: float = 1.0,
    searched: int | None = None,
    flop_factor: float = 3.0,
) -> Workload:
    """Return the FLOP of each activity.

    A search reads `probed_share` of the vectors, of which it compares `searched` dimensions (None: all). A training
    step costs `flop_factor` forward passes.
    """
    query, document = (
        tokens * retriever.flop_per_token(tokens) for tokens in (shape.encoded_query, shape.encoded_document)
    )
    return Workload(
        pair=shape.pair * lm.flop_per_token(shape.pair) + shape.continuation * lm.flop_per_prediction,
        document=document,
        train_step=flop_factor * shape.batch_size * (query + shape.k * document),
        encode_batch=shape.batch_size * query,
        search_batch=2.0 * shape.batch_size * (searched or retriever.dim) * shape.num_documents * probed_share,
    )


def total_tokens(shape: Shape) -> dict[str, float]:
    """Return the tokens that pass through a model in the whole run, by role."""
    return {
        "score": float(shape.steps * shape.pairs * shape.pair),
        "embed": float(shape.num_builds * shape.num_documents * shape.encoded_document),
        "train": float(shape.steps * shape.batch_size * (2 * shape.encoded_query + shape.k * shape.encoded_document)),
        "search": 0.0,
    }


def total_flop(shape: Shape, work: Workload) -> dict[str, float]:
    """Return the FLOP of the whole run, by role."""
    return {
        "score": shape.steps * shape.pairs * work.pair,
        "embed": shape.num_builds * shape.num_documents * work.document,
        "train": shape.steps * (work.train_step + work.encode_batch),
        "search": shape.steps * work.search_batch,
    }


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Bytes of a vector where searches read it, and the share of the vectors that one search reads.

    `num_lists` are those of an inverted file, each with a centroid; 0 for a kind without lists.
    """

    bytes_per_vector: float
    probed_share: float
    is_exact: bool
    num_lists: int = 0
    kind: IndexKind = field(default_factory=IndexKind)


def index_size(config: Config, dim: int, num_documents: int) -> IndexSize:
    """Return the size of the configured index. Raises UserError for a kind whose bytes are not known."""
    index = config.index
    rerank = index.rerank is Rerank.stored
    kind = resolve_kind(index.kind, dim, num_documents, index.nprobe, rerank)
    if kind.is_exact or kind.factory is None:
        return IndexSize(2.0 * dim, 1.0, True)
    lists, size = num_lists(kind.factory), bytes_per_vector(kind.factory, dim, num_documents)
    if size is None:
        raise UserError(
            f"index.kind is {kind.factory}; its bytes for each vector are not known here: expected a preset, such as pq"
        )
    return IndexSize(size, kind.nprobe / lists if lists else 1.0, is_exact=False, num_lists=lists, kind=kind)


def run_bytes(config: Config, shape: Shape, retriever: ModelSize, learning: int, index: IndexSize) -> dict[str, float]:
    """Return the most that a run directory holds, by part. A set that is prepared elsewhere takes nothing.

    `learning` are the weights that learn, which checkpoints hold with their moments.
    """
    versions = most_versions(shape.refresh, shape.checkpoint_every)
    dim, shards = searched_width(config, retriever.dim), index_actors(config.index).num_shards
    version = version_bytes(shape.num_documents, dim, retriever.parameters, config.index.block_documents, index, shards)
    return {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(shape, retriever.vocabulary),
        # With development texts the chosen weights may be others than the last, and have an index of their own.
        "index_versions": (versions + bool(shape.num_dev)) * version,
        "checkpoints": float((KEPT_CHECKPOINTS + 1) * FLOAT32 * (1 + ADAM_STATES) * learning),
        "scores": float(shape.steps * shape.pairs * SCORE_BYTES),
    }


def prepared_bytes(shape: Shape, vocabulary: int) -> float:
    """Return the bytes of documents with their token ids and of training texts, by the lengths of the configuration."""
    texts = TEXT_BYTES_PER_TOKEN * shape.document
    documents = documents_bytes(shape.num_documents, texts, shape.encoded_document, vocabulary)
    return documents + examples_bytes(shape.num_queries, TEXT_BYTES_PER_TOKEN * (shape.context + shape.continuation))


def documents_bytes(
    num_documents: int, text_bytes: float, tokens: float, vocabulary: int, name_bytes: float = NAME_BYTES
) -> float:
    """Return the bytes of each document's id, text, domain, source and token ids, and of where they end."""
    id_bytes = FLOAT16 if vocabulary < SMALL_VOCABULARY else FLOAT32
    return num_documents * (text_bytes + name_bytes + 4 * OFFSET_BYTES + tokens * id_bytes + TOKEN_END_BYTES)


def examples_bytes(num_examples: int, text_bytes: float, name_bytes: float = NAME_BYTES) -> float:
    """Return the bytes of each example's id, context, continuation, domain, source and gold documents."""
    return num_examples * (text_bytes + name_bytes + 6 * OFFSET_BYTES)


def version_bytes(
    num_documents: int, dim: int, parameters: int, block_documents: int, index: IndexSize, num_shards: int = 1
) -> float:
    """Return the bytes of an index version: its encoder, its float16 vectors, and a lossy kind's codes.

    Centroids are in the quantizer's file and in that of every shard.
    """
    files = -(-num_documents // rows_per_file(num_documents, block_documents)) * FILE_BYTES
    codes = 0.0 if index.is_exact else index.bytes_per_vector
    centroids = (num_shards + 1) * index.num_lists * FLOAT32 * dim
    return num_documents * (FLOAT16 * dim + codes) + files + centroids + FLOAT32 * parameters


class _Version(NamedTuple):
    number: int
    step: int


def most_versions(policy: RefreshPolicy, checkpoint_every: int) -> int:
    """Return the most index versions that are on disk at once, if every refresh takes `lag_steps`.

    Versions are removed when a checkpoint is written. What stays is the live one, the one before it, the one under way,
    and what the kept checkpoints name. After training one more is built before any other is removed.
    """
    live, pending = _Version(0, 0), None
    there, most = {0}, 1
    marks: list[set[int]] = []  # what each kept checkpoint names
    for step in range(policy.max_steps):
        live, pending = _after_boundary(policy, step, live, pending)
        in_use = {max(0, live.number - 1), live.number, (pending or live).number}
        there |= in_use
        most = max(most, len(there))
        if (step + 1) % checkpoint_every == 0:
            marks = [*marks, in_use][-KEPT_CHECKPOINTS:]
            there &= set().union(*marks)
    return max(most, len(there | {(pending or live).number + 1}))


def _after_boundary(
    policy: RefreshPolicy, step: int, live: _Version, pending: _Version | None
) -> tuple[_Version, _Version | None]:
    """Return the live version and the one under way, if a refresh is ready after `lag_steps`."""
    lag = policy.every_steps // 2 if policy.lag_steps is None else policy.lag_steps
    if pending and policy.is_due(step, live.step, pending.step, is_ready=step >= pending.step + lag):
        live, pending = pending, None
    if policy.start(step, live.step, pending.step if pending else None) is Start.begin:
        pending = _Version(live.number + 1, step)
    return (pending, None) if pending and policy.adopts_at_start else (live, pending)
