"""What a run has to compute, store and send: tokens, FLOP and bytes. Pure but for `count_documents`.

Texts are taken to fill their windows, a document that several queries found is counted for each of them, and a token
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
from replug.planning.trained import TrainedPart, whole

BYTES_PER_TOKEN_OF_TEXT = 4  # of English


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of texts, in tokens."""

    context: int
    continuation: int
    document: int

    @property
    def pair(self) -> int:
        return self.document + self.context + self.continuation

    @property
    def longest(self) -> int:
        """Of the texts that the retriever encodes."""
        return max(self.context, self.document)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: `batch_size` queries with `k` documents each, while `depth` batches are scored ahead of it."""

    batch_size: int
    k: int
    depth: int
    micro_batches: int = 1
    recompute: bool = False  # gradient checkpointing
    chunk_tokens: int | None = None  # whose activations are kept at a time, where each chunk is computed twice

    @property
    def pairs(self) -> int:
        return self.batch_size * self.k


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Texts that the LM measures: `windows` after training, by every method with `k` documents."""

    windows: int
    k: int
    refresh_windows: int = 0  # before training and at each refresh

    @property
    def pairs_per_window(self) -> int:
        """Scored after training in one call: without a document, and with those of three ways to choose them."""
        return 1 + 3 * self.k


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of the configuration that cost something."""

    step: StepShape
    lengths: Lengths
    num_documents: int
    num_queries: int
    refresh: RefreshPolicy
    heldout: HeldOut
    checkpoint_every: int

    @property
    def steps(self) -> int:
        return self.refresh.max_steps

    @property
    def num_refreshes(self) -> int:
        return self.refresh.num_starts

    @property
    def num_builds(self) -> int:
        """One before training, the refreshes, one after."""
        return self.num_refreshes + 2


def shape_of(config: Config, num_documents: int | None = None) -> Shape:
    """Raises UserError where nothing says how many documents the corpus has; `num_documents` comes first."""
    train, data, limit = config.train, config.data, config.retriever.max_tokens or 512
    return Shape(
        step=StepShape(
            train.batch_size,
            config.retrieve.k,
            train.pipeline_depth,
            train.micro_batches,
            train.gradient_checkpointing,
            train.chunk_tokens,
        ),
        lengths=Lengths(min(data.window, limit), data.window, min(data.document_tokens or data.window, limit)),
        num_documents=num_documents or count_documents(config),
        num_queries=data.num_queries,
        refresh=refresh_policy(config.refresh, train.max_steps, config.retriever.train is not TrainedSide.query),
        heldout=_heldout(config),
        checkpoint_every=config.checkpoint.every_steps,
    )


def _heldout(config: Config) -> HeldOut:
    evaluate, there = config.evaluate, config.data.num_heldout
    windows = there if evaluate.max_windows is None else min(evaluate.max_windows, there)
    return HeldOut(windows, evaluate.k, min(evaluate.refresh_windows, there))


def count_documents(config: Config) -> int:
    """From the prepared set, the file of documents, or data.num_documents."""
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


@dataclass(frozen=True, slots=True)
class Workload:
    """FLOP of each activity once: a pair scored, a document embedded, a step trained, a batch of queries encoded."""

    pair: float
    document: float
    train_step: float
    encode_batch: float
    search_batch: float


def searched_width(config: Config, width: int) -> int:
    """Numbers of a vector that is stored and searched by, of `width` numbers that the retriever gives."""
    dims = config.index.dims
    if dims is not None and dims > width:
        raise UserError(f"index.dims is {dims}, but the retriever's vectors have {width} numbers; expected no more")
    return dims or width


def work_of(
    shape: Shape,
    retriever: ModelSize,
    lm: ModelSize,
    probed_share: float = 1.0,
    searched: int | None = None,
    trained: TrainedPart | None = None,
) -> Workload:
    """`probed_share` is the part of the vectors that a search of a kind with lists looks at, `searched` their width.

    `trained` is what of the retriever learns. None: the whole width, and all weights.
    """
    query, document = (n * retriever.flop_per_token(n) for n in (shape.lengths.context, shape.lengths.document))
    scored = shape.lengths.pair * lm.flop_per_token(shape.lengths.pair)
    return Workload(
        pair=scored + shape.lengths.continuation * lm.flop_per_prediction,
        document=document,
        train_step=(trained or whole(retriever)).flop_factor
        * shape.step.batch_size
        * (query + shape.step.k * document),
        encode_batch=shape.step.batch_size * query,
        search_batch=2.0 * shape.step.batch_size * (searched or retriever.dim) * shape.num_documents * probed_share,
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole run, by role."""

    score: float
    embed: float
    train: float
    search: float


def total_tokens(shape: Shape) -> Totals:
    """Tokens that pass through a model; what is searched for is counted where it is encoded, in `train`."""
    trained = shape.step.batch_size * (2 * shape.lengths.context + shape.step.k * shape.lengths.document)
    return Totals(
        score=float(shape.steps * shape.step.pairs * shape.lengths.pair),
        embed=float(shape.num_builds * shape.num_documents * shape.lengths.document),
        train=float(shape.steps * trained),
        search=0.0,
    )


def total_flop(shape: Shape, work: Workload) -> Totals:
    return Totals(
        score=shape.steps * shape.step.pairs * work.pair,
        embed=shape.num_builds * shape.num_documents * work.document,
        train=shape.steps * (work.train_step + work.encode_batch),
        search=shape.steps * work.search_batch,
    )


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Bytes of one vector where searches read it, and the share of the vectors that one search reads.

    `num_lists` are those of an inverted file, each with a centroid; 0 for a kind without. `kind` is how it is searched.
    """

    bytes_per_vector: float
    probed_share: float
    is_exact: bool
    num_lists: int = 0
    kind: IndexKind = field(default_factory=IndexKind)


def index_size(config: Config, dim: int, num_documents: int) -> IndexSize:
    """Raises UserError for a kind whose bytes are not known."""
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


def network_gb(shape: Shape, retriever: ModelSize, num_builders: int, searched: int | None = None) -> dict[str, float]:
    """What roles send one another; within a node it goes through its memory and disk.

    Vectors are of `searched` numbers, None: all.
    """
    width = searched or retriever.dim
    pairs = shape.steps * shape.step.pairs
    parts = {
        "texts_to_scorers": pairs * shape.lengths.pair * float(BYTES_PER_TOKEN_OF_TEXT),
        "queries_to_searchers": shape.steps * shape.step.batch_size * 4.0 * width,
        "weights_to_builders": shape.num_builds * num_builders * 4.0 * retriever.parameters,
        "vectors_to_searchers": shape.num_builds * shape.num_documents * 2.0 * width,
    }
    return {name: value / 1e9 for name, value in {**parts, "total": sum(parts.values())}.items()}
