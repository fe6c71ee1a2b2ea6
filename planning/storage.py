"""Bytes that a run writes and holds: index versions, checkpoints, corpus, trainer. Pure. Actors: `cluster.layout`.

Estimates err on the large side where a number is not known before the work is done, and say so.
"""

from replug.index_workers.kinds import IndexKind

FLOAT32, FLOAT16 = 4, 2
ADAM_STATES = 2  # first and second moment, as large as the weights
VERSIONS = 2.5  # two versions stand side by side during a swap, beside what a third has begun to write
BYTES_PER_TOKEN = 5  # of English text, with room for ids and offsets


def vectors_bytes(num_documents: int, dim: int) -> int:
    """The float16 vectors of one index version."""
    return num_documents * dim * FLOAT16


def index_bytes(num_documents: int, dim: int, kind: IndexKind) -> int:
    """One index version on disk: its vectors, and for a lossy kind at most as much again."""
    return vectors_bytes(num_documents, dim) * (1 if kind.is_exact else 2)


def corpus_bytes(num_documents: int, document_tokens: int) -> int:
    """The texts of a corpus and their tokens."""
    return num_documents * document_tokens * (BYTES_PER_TOKEN + FLOAT16)


def checkpoint_bytes(num_weights: int) -> int:
    """Weights and Adam's two moments."""
    return num_weights * FLOAT32 * (1 + ADAM_STATES)


def trainer_bytes(num_weights: int) -> int:
    """The trainer's memory: weights, gradients, moments. Activations come on top."""
    return num_weights * FLOAT32 * (2 + ADAM_STATES)
