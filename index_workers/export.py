"""The documents and vectors of an index as Parquet, which any vector store loads: id, text, source, vector."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from replug.data.files import writing
from replug.data.shards import ROWS_PER_BATCH, in_batches
from replug.data.store import StoredCorpus, open_corpus
from replug.index_workers.build_plan import index_folder, missing_index
from replug.index_workers.version_store import VersionStore


def export_index(directory: Path, out: Path) -> int:
    """Write the newest version of a run's index, or the store that it asks, to a Parquet file; returns its rows.

    Vectors are float32, as queries are: those of an index were rounded to float16. Raises UserError where nothing is
    published or a file is damaged.
    """
    root = index_folder(directory).absolute()
    store = VersionStore(root)
    if not (versions := store.published()):
        raise missing_index(root)
    dim = store.plan(versions[-1]).dim
    schema = pa.schema(
        [*((name, pa.string()) for name in ("id", "text", "source")), ("vector", pa.list_(pa.float32(), dim))]
    )
    partial, count = out.with_name(f"{out.name}.partial"), 0
    with writing(partial):
        with pq.ParquetWriter(partial, schema) as writer:
            for rows in in_batches(_rows(store, versions[-1]), ROWS_PER_BATCH):
                writer.write_table(pa.Table.from_pylist(rows, schema))
                count += len(rows)
        partial.replace(out)
    return count


def _rows(store: VersionStore, version: int) -> Iterator[dict[str, Any]]:
    plan = store.plan(version)
    corpus = open_corpus(store.corpus_path(plan))
    if isinstance(corpus, StoredCorpus):
        with closing(corpus.open()) as source:
            for doc in source.iterate():
                yield {"id": doc.id, "text": doc.text, "source": doc.source, "vector": doc.vector}
        return
    for file in range(plan.num_files):
        store.check(version, store.vectors_paths(plan, [file]))
        documents = corpus.documents(plan.rows_of_file(file))
        for document, vector in zip(documents, store.open_vectors(plan, [file])[0], strict=True):
            fields = {"id": document.id, "text": document.text, "source": document.source}
            yield {**fields, "vector": vector.astype("float32")}
