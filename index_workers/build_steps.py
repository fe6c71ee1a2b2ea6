"""What is made of a version's vectors once they are embedded.

Each step can be done again, by anyone, with the same result.
"""

import shutil
from pathlib import Path

import numpy as np
import torch

from replug.index_workers import faiss_index
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.exact_search import ExactShard
from replug.index_workers.kinds import training_rows
from replug.index_workers.vectors import BlockVectors
from replug.index_workers.version_store import VersionStore
from replug.index_workers.watch import mean_drift, sample_rows


def make_quantizer(store: VersionStore, plan: BuildPlan) -> None:
    """Take over the quantizer of the version that the plan names, or train one on a sample of this one's vectors."""

    def save(partial: Path) -> int:
        if plan.quantizer_from is not None:
            before = store.quantizer_path(plan.quantizer_from)
            store.check(plan.quantizer_from, [before])
            shutil.copyfile(before, partial)
            return 0
        assert plan.kind.factory is not None
        rows = training_rows(plan.kind.factory, plan.num_documents)
        return faiss_index.train_quantizer(plan.kind, _vectors(store, plan, 0, 1).take(rows), partial)

    store.write_marked(store.quantizer_path(plan.version), save)


def build_shard(store: VersionStore, plan: BuildPlan, shard: int) -> None:
    """Fill the trained index with one shard's vectors, those of a file in memory at a time."""
    files, quantizer = plan.files_of_shard(shard), store.quantizer_path(plan.version)
    store.check(plan.version, [quantizer, *store.vectors_paths(plan, files)])
    vectors = store.open_vectors(plan, files)
    store.write_marked(store.shard_path(plan.version, shard), lambda out: faiss_index.fill(quantizer, vectors, out))


def search_exactly(
    store: VersionStore, plan: BuildPlan, part: int, parts: int, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and similarities [B, <=k] by the float16 vectors of one part of a version, whatever its kind."""
    return ExactShard(_vectors(store, plan, part, parts), torch.device("cpu")).search(queries, k)


def drift(store: VersionStore, previous: BuildPlan, plan: BuildPlan) -> float:
    """1 - mean cosine between the vectors that two versions have of the same documents, over a sample."""
    rows = sample_rows(plan.num_documents)
    return mean_drift(_vectors(store, previous, 0, 1).take(rows), _vectors(store, plan, 0, 1).take(rows))


def _vectors(store: VersionStore, plan: BuildPlan, part: int, parts: int) -> BlockVectors:
    vectors = store.open_vectors(plan, plan.files_of_shard(part, parts))
    return BlockVectors(plan.rows_of_shard(part, parts).start, vectors, plan.dim)
