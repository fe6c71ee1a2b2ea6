"""Bytes that a run leaves on disk: its prepared set, index versions, checkpoints and cache of scores. Pure.

The files are written by `data/shards.py`, `index_workers/version_store.py`, `train/callbacks.py` and
`models/score_cache.py`; tests compare the estimate with them. `replug plan` and `replug doctor` use it.
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
    """The numbers of a retriever that decide how much is stored."""

    dim: int
    parameters: int
    vocabulary: int
    learning: int | None = None  # of the parameters, with adapters; None: all


def run_bytes(config: Config, shape: Shape, retriever: StoredRetriever, index: IndexSize) -> dict[str, float]:
    """Return the most that a run directory holds, by part. A set that is prepared elsewhere takes nothing."""
    codes = 0.0 if index.is_exact else index.bytes_per_vector
    version = version_bytes(
        shape.num_documents,
        retriever,
        config.index.block_documents,
        code_bytes=codes,
        num_lists=index.num_lists,
        num_shards=index_actors(config.index).num_shards,
    )
    learning = retriever.parameters if retriever.learning is None else retriever.learning
    kept = config.checkpoint.keep_last
    return {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(shape, retriever),
        "index_versions": most_versions(shape.refresh, shape.checkpoint_every, kept) * version,
        "checkpoints": float((kept + 1) * FLOAT32 * (1 + ADAM_STATES) * learning),
        "scores": float(shape.steps * shape.pairs * SCORE_BYTES),
    }


def prepared_bytes(shape: Shape, retriever: StoredRetriever) -> float:
    """Documents with their token ids, and training texts without; lengths are those of the configuration."""
    texts = TEXT_BYTES_PER_TOKEN * shape.document
    documents = documents_bytes(shape.num_documents, texts, shape.document + SPECIAL_TOKENS, retriever.vocabulary)
    return documents + examples_bytes(shape.num_queries, TEXT_BYTES_PER_TOKEN * (shape.context + shape.continuation))


def documents_bytes(
    num_documents: int, text_bytes: float, tokens: float, vocabulary: int, name_bytes: float = NAME_BYTES
) -> float:
    """Id, text, domain and source of each document, its token ids, and where they end."""
    id_bytes = FLOAT16 if vocabulary < SMALL_VOCABULARY else FLOAT32
    return num_documents * (text_bytes + name_bytes + 4 * OFFSET_BYTES + tokens * id_bytes + TOKEN_END_BYTES)


def examples_bytes(num_examples: int, text_bytes: float, name_bytes: float = NAME_BYTES) -> float:
    """Id, context, continuation, domain, source and gold documents of each text."""
    return num_examples * (text_bytes + name_bytes + 6 * OFFSET_BYTES)


def version_bytes(
    num_documents: int,
    retriever: StoredRetriever,
    block_documents: int,
    code_bytes: float = 0.0,
    num_lists: int = 0,
    num_shards: int = 1,
) -> float:
    """One index version: its encoder, its float16 vectors, and a lossy kind's codes.

    Centroids of `num_lists` are in the quantizer's file and in that of every shard.
    """
    files = -(-num_documents // rows_per_file(num_documents, block_documents)) * FILE_BYTES
    vectors = num_documents * (FLOAT16 * retriever.dim + code_bytes)
    centroids = (num_shards + 1) * num_lists * FLOAT32 * retriever.dim
    return vectors + files + centroids + FLOAT32 * retriever.parameters


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
