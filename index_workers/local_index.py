"""Search the newest published version of an index in this process, as `replug ask` does, or export it as Parquet."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from replug.index_workers.build_plan import BuildPlan, index_folder, missing_index
from replug.index_workers.exact_search import merge_top_k
from replug.index_workers.faiss_index import set_search_threads
from replug.index_workers.searcher import open_shard
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.black_box_lm import require_texts
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.encoder_files import has_tuned_queries
from replug.models.ensemble import Retrieved
from replug.models.hardware import available_cores


class LocalIndex:
    """A published index. Raises UserError if none is published, a file is damaged, or the corpus has another size."""

    def __init__(self, root: Path, threads: int) -> None:
        set_search_threads(threads)
        self.root = root
        store = VersionStore(root.absolute())
        versions = store.published()
        if not versions:
            raise missing_index(root)
        self.plan = store.plan(versions[-1])
        store.check_encoder(self.plan.version)
        self.encoder_folder = store.encoder_folder(self.plan.version)
        self.corpus = store.open_corpus(self.plan)
        num_shards = self.plan.num_shards
        self._shards = [open_shard(store, self.plan, shard, num_shards) for shard in range(num_shards)]
        self.is_independent = all(shard.is_independent for shard in self._shards)  # see `searcher.Shard`

    def query_encoder(self) -> Encoder:
        """Load the encoder. Raises UserError if a query encoder was tuned for another document encoder."""
        plan, own = self.plan, query_encoder_folder(self.root)
        return Encoder(
            str(self.encoder_folder),
            plan.similarity,
            plan.max_tokens,
            query_path=str(own) if own else None,
            dims=plan.dims,
        )

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, k], best first, for queries [B, D]."""
        return merge_top_k([shard.search(queries, k) for shard in self._shards], k)


def query_encoder_folder(root: Path) -> Path | None:
    """Return the query encoder of a run that tuned only the query side, else None."""
    tuned = root.absolute().parent / "retriever"
    return tuned if has_tuned_queries(str(tuned)) else None


def retriever_identity(plan: BuildPlan, root: Path) -> str:
    """Identify the retriever that searches an index: equal ones find the same documents."""
    own = query_encoder_folder(root)
    return plan.retriever + (f":queries by {weights_sha256(own)[:16]}" if own else "")


class IndexRetriever:
    """A `models.replug_lm.Retriever` over a `LocalIndex`. `encoder` encodes its queries."""

    def __init__(self, index: LocalIndex) -> None:
        self._index = index
        self.encoder = index.query_encoder()
        self.identity = retriever_identity(index.plan, index.root)
        self.temperature = self.encoder.temperature

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Return up to `k` documents for each query, the most similar first."""
        require_texts(queries, "queries")
        vectors = self.encoder.encode_query(list(queries)).numpy()
        require_finite_vectors(vectors, [f"query {number}" for number in range(len(queries))])
        rows, similarities = self._index.search(vectors, min(k, self._index.plan.num_documents))
        return [
            [
                Retrieved(document.text, float(similarity), document.id, document.source)
                for document, similarity in zip(self._index.corpus.documents(nearest), own, strict=True)
            ]
            for nearest, own in zip(rows, similarities, strict=True)
        ]


class RunRetriever(IndexRetriever):
    """Searches the newest published index of a run, in this process; later versions do not replace it.

    `directory` is a run or the folder of an index. Raises UserError if nothing is published.

    >>> retriever = RunRetriever("./my-run")
    >>> [document.id for document in retriever.retrieve(["a market on Friday"], k=2)[0]]
    ['d0', 'd1']
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(LocalIndex(index_folder(Path(directory).expanduser()), available_cores()))
