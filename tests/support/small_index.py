"""A published index over a few documents, by the stand-in encoder and without Ray."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from replug.data.records import Document
from replug.data.shards import corpus_sha256, write_documents
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.packaged import resolve_encoder_path
from tests.support.index_versions import PLAN, publish


def write_small_index(
    root: Path, texts: Sequence[str], encoder_path: str = "stand_in", version: int = 0, dims: int | None = None
) -> Path:
    """The index's folder; documents are named d0, d1 and so on. Each version has a corpus of its own."""
    folder = resolve_encoder_path(encoder_path)
    encoder = Encoder(folder, PLAN.similarity, PLAN.max_tokens, dims=dims)
    corpus = root / "data" / ("documents" if version == 0 else f"documents{version}")
    write_documents(corpus, [Document(f"d{row}", text, "x", "s") for row, text in enumerate(texts)])
    store = VersionStore(root / "index")
    plan = replace(
        PLAN,
        version=version,
        weights_sha256=store.save_snapshot(version, lambda copy: shutil.copytree(folder, copy) and None),
        corpus_path=str(corpus.absolute()),
        corpus_sha256=corpus_sha256(corpus),
        num_documents=len(texts),
        dim=encoder.dim,
        dims=encoder.dims,
    )
    store.begin(plan)
    publish(store, plan, encoder.encode_document(list(texts)).numpy())
    return root / "index"
