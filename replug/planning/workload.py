"""What a run computes and reads: tokens, FLOP, and the bytes of its index. Pure but for `count_documents`.

Texts are taken to fill their examples, a document that several queries found is counted for each of them, and a token
of the retriever is taken for one of the LM.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from replug.config.choices import Rerank, TrainedSide
from replug.config.errors import UserError
from replug.config.refresh_policy import RefreshPolicy, refresh_policy
from replug.config.schema import Config
from replug.data.rows import count_rows
from replug.index_workers.kinds import IndexKind, bytes_per_vector, num_lists, resolve_kind
from replug.planning.model_sizes import ModelSize


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a configuration that cost something; lengths of texts are in tokens.

    After training the LM measures `heldout` texts by every method with `heldout_k` documents, and `refresh_heldout` of
    them before training and at each refresh.
    """

    batch_size: int
    k: int
    depth: int  # batches scored ahead
    micro_batches: int
    chunk_tokens: int | None
    context: int
    continuation: int
    document: int
    num_documents: int
    num_queries: int
    refresh: RefreshPolicy
    checkpoint_every: int
    heldout: int = 0
    heldout_k: int = 1
    refresh_heldout: int = 0

    @property
    def pairs(self) -> int:
        """Pairs that the LM scores in a step."""
        return self.batch_size * self.k

    @property
    def pair(self) -> int:
        """Tokens of a pair."""
        return self.document + self.context + self.continuation

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the retriever encodes."""
        return max(self.context, self.document)

    @property
    def steps(self) -> int:
        return self.refresh.max_steps

    @property
    def num_builds(self) -> int:
        """Builds of the index: one before training, the refreshes, one after."""
        return self.refresh.num_starts + 2


def shape_of(config: Config, num_documents: int | None = None) -> Shape:
    """Return the shape of a run. Counts the documents where `num_documents` is None."""
    train, data, evaluate = config.train, config.data, config.evaluate
    limit, there = config.retriever.max_tokens or 512, config.data.num_heldout
    return Shape(
        batch_size=train.batch_size,
        k=config.retrieve.k,
        depth=train.pipeline_depth,
        micro_batches=train.micro_batches,
        chunk_tokens=train.chunk_tokens,
        context=min(data.context_tokens, limit),
        continuation=data.context_tokens,
        document=min(data.document_tokens or data.context_tokens, limit),
        num_documents=num_documents or count_documents(config),
        num_queries=data.num_queries,
        refresh=refresh_policy(config.refresh, train.max_steps, config.retriever.train is not TrainedSide.query),
        checkpoint_every=config.checkpoint.every_steps,
        heldout=there if evaluate.max_examples is None else min(evaluate.max_examples, there),
        heldout_k=evaluate.k,
        refresh_heldout=min(evaluate.refresh_examples, there),
    )


def count_documents(config: Config) -> int:
    """Return the documents of the prepared set, of the corpus file, or data.num_documents. Raises UserError without."""
    data = config.data
    for folder in (data.prepared, data.out, f"{config.run_dir}/data"):
        manifest = Path(folder).expanduser() / "manifest.json" if folder else None
        if manifest is not None and manifest.is_file():
            return int(json.loads(manifest.read_text())["counts"]["documents"])
    if data.corpus and Path(data.corpus).expanduser().is_file():
        return count_rows(Path(data.corpus).expanduser())
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
    query, document = (tokens * retriever.flop_per_token(tokens) for tokens in (shape.context, shape.document))
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
        "embed": float(shape.num_builds * shape.num_documents * shape.document),
        "train": float(shape.steps * shape.batch_size * (2 * shape.context + shape.k * shape.document)),
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
    kind = resolve_kind(index.kind, dim, num_documents, index.nprobe, rerank, index.overretrieve)
    if kind.is_exact or kind.factory is None:
        return IndexSize(2.0 * dim, 1.0, True)
    lists, size = num_lists(kind.factory), bytes_per_vector(kind.factory, dim, num_documents)
    if size is None:
        raise UserError(
            f"index.kind is {kind.factory}; its bytes for each vector are not known here: expected a preset, such as pq"
        )
    return IndexSize(size, kind.nprobe / lists if lists else 1.0, is_exact=False, num_lists=lists, kind=kind)
