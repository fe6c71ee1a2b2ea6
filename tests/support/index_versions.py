"""Small index versions, planned and written without Ray; what of one is on the disk when, and damage to it."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from replug.data.records import Document
from replug.data.shards import corpus_sha256, write_documents
from replug.data.store import CorpusStore
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.kinds import IndexKind
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from tests.support.small_disk import space_of

PLAN = BuildPlan(
    version=3,
    step=12,
    weights_sha256="w",
    corpus_path="corpus",
    corpus_sha256="c",
    num_documents=10,
    block_documents=4,
    similarity="cosine",
    max_tokens=64,
    dim=2,
    dtype="float32",
    tokens_per_batch=512,
)


def save_weights(content: bytes) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)

    return save


DIM, ROWS = 4, 10
VECTORS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
LOSSY = {"kind": IndexKind("SQ8", overretrieve=2), "num_shards": 2}


def save_encoder(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps({"hidden_size": DIM}))
    (folder / "tokenizer.json").write_text('{"vocabulary": {"a": 0}}')


def write_corpus(path: Path, rows: int = ROWS) -> Path:
    write_documents(path, [Document(f"d{row}", f"text {row}", "x", "s") for row in range(rows)])
    return path


def begin(store: VersionStore, version: int = 0, **changes: object) -> BuildPlan:
    corpus = store.root.parent / "data" / "documents"
    plan = replace(
        PLAN,
        version=version,
        step=7,
        weights_sha256=store.save_snapshot(version, save_encoder),
        corpus_path=os.path.relpath(corpus, store.root),
        corpus_sha256=corpus_sha256(corpus),
        num_documents=ROWS,
        dim=DIM,
    )
    plan = replace(plan, **changes)
    store.begin(plan)
    return plan


def begin_of(store: VersionStore, encoder: Encoder, corpus: Path, version: int = 0, **changes: object) -> BuildPlan:
    """A version that is begun by an encoder's weights over the documents of a corpus."""
    plan = replace(
        PLAN,
        version=version,
        weights_sha256=store.save_snapshot(version, encoder.save),
        corpus_path=str(corpus),
        corpus_sha256=corpus_sha256(corpus),
        num_documents=len(CorpusStore(corpus)),
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        modules=encoder.pooling,
        query_prompt=encoder.prompt("query"),
        document_prompt=encoder.prompt("document"),
    )
    plan = replace(plan, **changes)  # type: ignore[arg-type]
    store.begin(plan)
    return plan


def publish(store: VersionStore, plan: BuildPlan, vectors: np.ndarray = VECTORS) -> None:
    for file in range(plan.num_files):
        rows = plan.rows_of_file(file)
        store.write_vectors(plan.version, file, vectors[rows.start : rows.stop])
    if not plan.kind.is_exact:
        Builder(store.root, 1).make_quantizer(plan)
        for shard in range(plan.num_shards):
            Builder(store.root, 1).build_shard(plan, shard)
    store.publish(plan)


def flip(path: Path, place: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def written_before(store: VersionStore, plan: BuildPlan, name: str) -> int:
    """Bytes that a version has taken when the file of this name is about to be written."""
    folder = store.folder(plan.version)
    files = [folder / "encoder", folder / "inputs.json"]
    for path in store.files(plan):
        mark = path.with_name(path.name + ".json") if path.suffix == ".faiss" else path.with_suffix(".json")
        files += [path, mark]
    files.append(folder / "manifest.json")
    return space_of(itertools.takewhile(lambda path: path.name != name, files))
