"""Bytes that a run leaves on disk: its prepared set, index versions, checkpoints and cache of scores. Pure.

What the files hold is decided in `data/shards.py`, `index_workers/version_store.py`, `train/callbacks.py` and
`models/score_cache.py`; tests compare the estimate with what these have written. `replug plan` and `replug doctor`
both take their figures from here.
"""

from dataclasses import dataclass

from replug.configs.refresh_policy import RefreshPolicy, Start
from replug.configs.schema import Config
from replug.index_workers.version_store import IndexState
from replug.planning.workload import IndexSize, Shape

FLOAT32, FLOAT16 = 4, 2
ADAM_STATES = 2  # first and second moment, as large as the weights
TEXT_BYTES_PER_TOKEN = 4.0  # of English prose; program code has about 3
NAME_BYTES = 60.0  # a row's id, domain and source together
OFFSET_BYTES = 4  # where a string of a row ends
TOKEN_END_BYTES = 8  # where a document's token ids end
SPECIAL_TOKENS = 2  # the retriever's, round a document's own
SMALL_VOCABULARY = 1 << 16  # token ids below it take two bytes, others four
BLOCK_BYTES = 350  # beside the vectors of a block: header, mark, entry in the manifest
SCORE_BYTES = 46  # a row of the cache: key, sum and counts, in pages that random keys fill to two thirds


@dataclass(frozen=True, slots=True)
class StoredRetriever:
    """What of the retriever decides how much is stored."""

    dim: int
    parameters: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class MeanRow:
    """Bytes of a row's texts, and of its id, domain and source together."""

    texts: float
    names: float = NAME_BYTES


def run_bytes(config: Config, shape: Shape, retriever: StoredRetriever, index: IndexSize) -> dict[str, float]:
    """What a run directory holds at most, by part. A set that is prepared elsewhere takes nothing."""
    codes = 0.0 if index.is_exact else index.bytes_per_vector
    version = version_bytes(shape.num_documents, retriever, codes, config.index.block_documents)
    kept = config.checkpoint.keep_last
    return {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(shape, retriever),
        "index_versions": most_versions(shape.refresh, shape.checkpoint_every, kept) * version,
        "checkpoints": float((kept + 1) * checkpoint_bytes(retriever.parameters)),
        "scores": float(shape.steps * shape.step.pairs * SCORE_BYTES),
    }


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


def version_bytes(num_documents: int, retriever: StoredRetriever, code_bytes: float, block_documents: int) -> float:
    """One index version: its float16 vectors in blocks, `code_bytes` of each vector beside them, and its encoder."""
    blocks = -(-num_documents // block_documents) * BLOCK_BYTES
    return num_documents * (FLOAT16 * retriever.dim + code_bytes) + blocks + FLOAT32 * retriever.parameters


def checkpoint_bytes(parameters: int) -> int:
    """Weights and Adam's two moments."""
    return FLOAT32 * (1 + ADAM_STATES) * parameters


def most_versions(policy: RefreshPolicy, checkpoint_every: int, keep_last: int) -> int:
    """Index versions that are on disk at once, where every refresh takes `lag_steps`.

    Versions are removed when a checkpoint is written. What stays is the live one, the one before it, the one under way,
    and what the kept checkpoints name. After training one more is built before any other is removed.
    """
    live, pending, oldest, most = IndexState(0, 0), None, 0, 1
    marks: list[int] = []  # the oldest version that each kept checkpoint names
    for step in range(policy.max_steps):
        live, pending = _after_boundary(policy, step, live, pending)
        most = max(most, (pending or live).version - oldest + 1)
        if (step + 1) % checkpoint_every == 0:
            marks = [*marks, max(0, live.version - 1)][-keep_last:]
            oldest = min(marks)
    return max(most, live.version + 1 - oldest + 1)


def _after_boundary(
    policy: RefreshPolicy, step: int, live: IndexState, pending: IndexState | None
) -> tuple[IndexState, IndexState | None]:
    """The live version and the one under way, where a refresh is ready after `lag_steps`."""
    if pending and policy.is_due(step, live.step, pending.step, is_ready=step >= pending.step + policy.lag_steps):
        live, pending = pending, None
    if policy.start(step, live.step, pending.step if pending else None) is Start.begin:
        pending = IndexState(live.version + 1, step)
    return (pending, None) if pending and policy.adopts_at_start else (live, pending)
