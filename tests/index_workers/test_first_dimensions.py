"""An index of the first numbers of the vectors: its answers, its identity, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot, require_same_index
from replug.index_workers.build_plan import IndexState
from replug.index_workers.builder import Builder
from replug.index_workers.local_index import IndexRetriever, LocalIndex, retriever_identity
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from tests.support.preparing import debug_set

DIMS = 8
QUERIES = ["mida furo", "pelo tana", "furo furo mida"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return debug_set(tmp_path_factory.mktemp("data"), "data.num_documents=100")


def build(config: Config, data: PreparedSet, root: Path, dims: int | None, kind: str) -> LocalIndex:
    config = replace(config, index=replace(config.index, dims=dims, kind=kind, overretrieve=len(data.corpus)))
    store, builder = VersionStore(root), Builder(root, threads=1)
    root.mkdir()
    plan = publish_snapshot(config, load_encoder(config.retriever, dims=dims), data, store, IndexState(0, 0))
    store.begin(plan)
    for file in range(plan.num_files):
        builder.embed_file(plan, file)
    if not plan.kind.is_exact:
        builder.make_quantizer(plan)
        for shard in range(plan.num_shards):
            builder.build_shard(plan, shard)
    store.publish(plan)
    return LocalIndex(root, threads=1)


@pytest.mark.parametrize("kind", ["flat_fp16", "sq8"])
def test_a_search_is_exact_search_by_truncated_vectors_of_length_one(debug_config, data, tmp_path, kind):
    """A lossy kind's candidates are ordered by the stored vectors, so that its similarities are the exact ones too."""
    index = build(debug_config, data, tmp_path / "index", DIMS, kind)
    whole = load_encoder(debug_config.retriever)
    texts = [document.text for document in data.corpus.iterate()]
    queries, documents = (whole.encode(of).numpy()[:, :DIMS] for of in (QUERIES, texts))
    queries, documents = (of / np.linalg.norm(of, axis=1, keepdims=True) for of in (queries, documents))
    expected = queries.astype(np.float64) @ documents.astype(np.float16).astype(np.float64).T
    rows, similarities = index.search(index.query_encoder().encode(QUERIES).numpy(), 5)
    assert index.plan.dim == index.plan.dims == DIMS
    np.testing.assert_allclose(similarities, np.sort(-expected)[:, :5] * -1, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, rows, axis=1), similarities, atol=1e-5)
    [found] = IndexRetriever(index).retrieve(QUERIES[:1], 5)
    assert [document.similarity for document in found] == similarities[0].tolist()


def test_how_many_numbers_are_searched_by_is_part_of_an_indexs_identity(debug_config, data, tmp_path):
    first = build(debug_config, data, tmp_path / "first", DIMS, "flat_fp16")
    whole = build(debug_config, data, tmp_path / "whole", None, "flat_fp16")
    assert first.plan.weights_sha256 == whole.plan.weights_sha256
    identities = [retriever_identity(index.plan, index.root) for index in (first, whole)]
    assert identities[0] == f"{identities[1]}:first {DIMS}"
    with pytest.raises(UserError, match=r"holds an index with dim=8, but dim=32 is asked for"):
        require_same_index(debug_config, load_encoder(debug_config.retriever), data, VersionStore(tmp_path / "first"))
