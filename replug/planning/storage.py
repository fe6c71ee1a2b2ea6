"""Bytes that a run leaves on disk: its prepared set, index versions, checkpoints and cache of scores. Pure.

What the files hold is decided in `data/shards.py`, `index_workers/version_store.py`, `train/callbacks.py` and
`models/score_cache.py`; tests compare the estimate with what these have written. `replug plan` and `replug doctor`
both take their figures from here.
"""

from dataclasses import dataclass
from typing import NamedTuple

from replug.cluster.layout import index_actors
from replug.config.refresh_policy import RefreshPolicy, Start
from replug.config.schema import Config
from replug.index_workers.build_plan import rows_per_file
from replug.planning.workload import IndexSize, Shape

FLOAT32, FLOAT16 = 4, 2
ADAM_STATES = 2  # first and second moment, as large as the weights
TEXT_BYTES_PER_TOKEN = 4.0  # of English prose; program code has about 3
NAME_BYTES = 60.0  # a row's id, domain and source together
OFFSET_BYTES = 4  # where a string of a row ends
TOKEN_END_BYTES = 8  # where a document's token ids end
SPECIAL_TOKENS = 2  # the retriever's, round a document's own
SMALL_VOCABULARY = 1 << 16  # token ids below it take two bytes, others four
FILE_BYTES = 350  # beside the vectors in a file: header, mark, entry in the manifest
SCORE_BYTES = 45  # a row of the cache: key, sum and counts, in pages that random keys fill to two thirds


@dataclass(frozen=True, slots=True)
class StoredRetriever:
    """What of the retriever decides how much is stored."""

    dim: int
    parameters: int
    vocabulary: int
    learning: int | None = None  # of the parameters, with adapters; None: all


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """`code_bytes` are a lossy kind's of each vector, beside its float16 numbers.

    Centroids of `num_lists` are in the quantizer's file and in that of every shard.
    """

    block_documents: int
    code_bytes: float = 0.0
    num_lists: int = 0
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class MeanRow:
    """Bytes of a row's texts, and of its id, domain and source together."""

    texts: float
    names: float = NAME_BYTES


def run_bytes(config: Config, shape: Shape, retriever: StoredRetriever, index: IndexSize) -> dict[str, float]:
    """What a run directory holds at most, by part. A set that is prepared elsewhere takes nothing."""
    codes = 0.0 if index.is_exact else index.bytes_per_vector
    stored = StoredIndex(config.index.block_documents, codes, index.num_lists, index_actors(config.index).num_shards)
    version, kept = version_bytes(shape.num_documents, retriever, stored), config.checkpoint.keep_last
    return {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(shape, retriever),
        "index_versions": most_versions(shape.refresh, shape.checkpoint_every, kept) * version,
        "checkpoints": float((kept + 1) * checkpoint_bytes(_learning(retriever))),
        "scores": float(shape.steps * shape.step.pairs * SCORE_BYTES),
    }


def _learning(retriever: StoredRetriever) -> int:
    return retriever.parameters if retriever.learning is None else retriever.learning


def prepared_bytes(shape: Shape, retriever: StoredRetriever) -> float:
    """Documents with their token ids, and training texts without; lengths are those of the configuration."""
    lengths = shape.lengths
    document = MeanRow(TEXT_BYTES_PER_TOKEN * lengths.document)
    query = MeanRow(TEXT_BYTES_PER_TOKEN * (lengths.context + lengths.continuation))
    tokens = lengths.document + SPECIAL_TOKENS
    documents = documents_bytes(shape.num_documents, document, tokens, retriever.vocabulary)
    return documents + windows_bytes(shape.num_queries, query)


def documents_bytes(num_documents: int, row: MeanRow, tokens: float, vocabulary: int) -> float:
    """Id, text, domain and source of each document, its token ids, and where they end."""
    id_bytes = FLOAT16 if vocabulary < SMALL_VOCABULARY else FLOAT32
    return num_documents * (row.texts + row.names + 4 * OFFSET_BYTES + tokens * id_bytes + TOKEN_END_BYTES)


def windows_bytes(num_windows: int, row: MeanRow) -> float:
    """Id, context, continuation, domain, source and gold documents of each text."""
    return num_windows * (row.texts + row.names + 6 * OFFSET_BYTES)


def version_bytes(num_documents: int, retriever: StoredRetriever, index: StoredIndex) -> float:
    """One index version: its encoder, its float16 vectors, and the files of a lossy kind."""
    files = -(-num_documents // rows_per_file(num_documents, index.block_documents)) * FILE_BYTES
    vectors = num_documents * (FLOAT16 * retriever.dim + index.code_bytes)
    centroids = (index.num_shards + 1) * index.num_lists * FLOAT32 * retriever.dim
    return vectors + files + centroids + FLOAT32 * retriever.parameters


def checkpoint_bytes(parameters: int) -> int:
    """Weights that learn and Adam's two moments."""
    return FLOAT32 * (1 + ADAM_STATES) * parameters


class _Version(NamedTuple):
    number: int
    step: int


def most_versions(policy: RefreshPolicy, checkpoint_every: int, keep_last: int) -> int:
    """Index versions that are on disk at once, where every refresh takes `lag_steps`.

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
            marks = [*marks, in_use][-keep_last:]
            there &= set().union(*marks)
    return max(most, len(there | {(pending or live).number + 1}))


def _after_boundary(
    policy: RefreshPolicy, step: int, live: _Version, pending: _Version | None
) -> tuple[_Version, _Version | None]:
    """The live version and the one under way, where a refresh is ready after `lag_steps`."""
    if pending and policy.is_due(step, live.step, pending.step, is_ready=step >= pending.step + policy.lag_steps):
        live, pending = pending, None
    if policy.start(step, live.step, pending.step if pending else None) is Start.begin:
        pending = _Version(live.number + 1, step)
    return (pending, None) if pending and policy.adopts_at_start else (live, pending)
