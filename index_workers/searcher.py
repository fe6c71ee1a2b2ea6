"""Serving searches over one shard. A plain class; `service` makes actors of it.

A version is loaded when it is first asked for, so a searcher that was killed and restarted answers
again by itself, from the published files.
"""

import threading
from pathlib import Path

import numpy as np

from index_workers.faiss_shard import FaissShard, set_search_threads
from index_workers.version_store import VersionStore


class Searcher:
    """Shard `shard` of `num_shards`. Several threads may call it at once."""

    def __init__(self, root: Path, kind: str, shard: int, num_shards: int, threads: int) -> None:
        set_search_threads(threads)
        self._store = VersionStore(root)
        self._kind, self._shard, self._num_shards = kind, shard, num_shards
        self._versions: dict[int, FaissShard] = {}
        self._loading = threading.Lock()

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and similarities [B, <=k] of the nearest documents of this shard in one version."""
        return self.prepare(version).search(queries, k)

    def prepare(self, version: int) -> FaissShard:
        """Load a version beside those already held."""
        with self._loading:
            if version not in self._versions:
                self._versions[version] = self._load(version)
            return self._versions[version]

    def load(self, version: int) -> int:
        """As `prepare`; returns the number of documents, which unlike an index can cross processes."""
        return len(self.prepare(version))

    def release(self, keep: list[int]) -> None:
        """Drop the other versions; searches under way finish on the one they began on."""
        self._versions = {version: index for version, index in self._versions.items() if version in keep}

    def _load(self, version: int) -> FaissShard:
        plan = self._store.plan(version)
        blocks = self._store.blocks_of_shard(plan, self._shard, self._num_shards)
        vectors = self._store.read_blocks(version, blocks)
        return FaissShard(plan.dim, self._kind, blocks.start * plan.block_documents, vectors)
