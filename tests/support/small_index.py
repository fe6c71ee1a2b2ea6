"""A published index over a few documents, by the stand-in encoder and without Ray."""

from collections.abc import Sequence
from pathlib import Path

from replug.data.records import Document
from replug.data.shards import write_documents
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.packaged import resolve_encoder_path
from tests.support.index_versions import PLAN, begin_of, publish


def write_small_index(
    root: Path, texts: Sequence[str], encoder_path: str = "stand_in", version: int = 0, dims: int | None = None
) -> Path:
    """The index's folder; documents are named d0, d1 and so on. Each version has a corpus of its own."""
    encoder = Encoder(resolve_encoder_path(encoder_path), PLAN.similarity, PLAN.max_tokens, dims=dims)
    corpus = root / "data" / ("documents" if version == 0 else f"documents{version}")
    write_documents(corpus, [Document(f"d{row}", text, "x", "s") for row, text in enumerate(texts)])
    store = VersionStore(root / "index")
    plan = begin_of(store, encoder, corpus.absolute(), version=version, dims=encoder.dims)
    publish(store, plan, encoder.encode_document(list(texts)).numpy())
    return root / "index"
