"""An index searched in the process that asks, without Ray."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.records import Document
from replug.data.shards import write_documents
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot, require_same_index
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.builder import Builder
from replug.index_workers.local_index import IndexRetriever, LocalIndex, retriever_identity
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from tests.support.encoder_folders import write_chain, write_encoder
from tests.support.index_versions import ROWS, VECTORS, begin, begin_of, publish, write_corpus
from tests.support.preparing import debug_set

QUERIES = np.random.default_rng(1).standard_normal((3, VECTORS.shape[1])).astype(np.float32)


def brute_force(vectors: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-(QUERIES @ vectors.astype(np.float16).astype(np.float32).T), axis=1, kind="stable")[:, :k]


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 0 is published."""
    write_corpus(tmp_path / "run" / "data" / "documents")
    store = VersionStore(tmp_path / "run" / "index")
    publish(store, begin(store))
    return store


def test_a_moved_run_directory_is_searched_where_it_lies_now(store: VersionStore, tmp_path: Path) -> None:
    store.root.parent.rename(tmp_path / "moved")
    index = LocalIndex(tmp_path / "moved" / "index", threads=1)
    rows, similarities = index.search(QUERIES, 3)
    np.testing.assert_array_equal(rows, brute_force(VECTORS, 3))
    assert (np.diff(similarities, axis=1) <= 0).all()
    assert [doc.id for doc in index.corpus.documents(rows[0])] == [f"d{row}" for row in rows[0]]


def test_a_corpus_that_is_gone_or_of_another_size_is_refused(store: VersionStore) -> None:
    corpus = store.corpus_path(store.plan(0))
    write_corpus(corpus, rows=ROWS + 1)
    with pytest.raises(UserError, match=rf"{corpus} holds 11 documents, but index version 0 was begun over 10"):
        LocalIndex(store.root, threads=1)
    (corpus / "00000.arrow").unlink()
    with pytest.raises(UserError, match=rf"the index's corpus {corpus} is gone; bring it back, or build"):
        LocalIndex(store.root, threads=1)


DIMS = 8
TEXT_QUERIES = ["mida furo", "pelo tana", "furo furo mida"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return debug_set(tmp_path_factory.mktemp("data"), "data.num_documents=100")


def build(config: Config, data: PreparedSet, root: Path, dims: int | None, kind: str) -> LocalIndex:
    config = replace(config, index=replace(config.index, dims=dims, kind=kind))
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
    queries, documents = (whole.encode(of).numpy()[:, :DIMS] for of in (TEXT_QUERIES, texts))
    queries, documents = (of / np.linalg.norm(of, axis=1, keepdims=True) for of in (queries, documents))
    expected = queries.astype(np.float64) @ documents.astype(np.float16).astype(np.float64).T
    rows, similarities = index.search(index.query_encoder().encode(TEXT_QUERIES).numpy(), 5)
    assert index.plan.dim == index.plan.dims == DIMS
    np.testing.assert_allclose(similarities, np.sort(-expected)[:, :5] * -1, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, rows, axis=1), similarities, atol=1e-5)
    [found] = IndexRetriever(index).retrieve(TEXT_QUERIES[:1], 5)
    assert [document.similarity for document in found] == similarities[0].tolist()


def test_how_many_numbers_are_searched_by_is_part_of_an_indexs_identity(debug_config, data, tmp_path):
    first = build(debug_config, data, tmp_path / "first", DIMS, "flat_fp16")
    whole = build(debug_config, data, tmp_path / "whole", None, "flat_fp16")
    assert first.plan.weights_sha256 == whole.plan.weights_sha256
    identities = [retriever_identity(index.plan, index.root) for index in (first, whole)]
    assert identities[0] == f"{identities[1]}:first {DIMS}"
    with pytest.raises(UserError, match=r"dim is 32, but the index version in .* was made with 8"):
        require_same_index(debug_config, load_encoder(debug_config.retriever), data, VersionStore(tmp_path / "first"))


TEXTS = [f"w{n} w{n + 7} w{n + 9}" for n in range(12)]
PROMPTS = {"query": "query : ", "passage": "passage : "}


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    write_encoder(tmp_path / "encoder", "bert")
    pooling = {"pooling_mode": ["mean", "cls"], "include_prompt": False}
    write_chain(tmp_path / "encoder", pooling, ["Dense"], PROMPTS)
    return Encoder(str(tmp_path / "encoder"))


def built(root: Path, encoder: Encoder) -> tuple[VersionStore, BuildPlan]:
    corpus = root / "documents"
    write_documents(corpus, [Document(f"d{row}", text, "x", "s") for row, text in enumerate(TEXTS)])
    store = VersionStore(root / "index")
    plan = begin_of(store, encoder, corpus, tokens_per_batch=64)
    threads, builder = torch.get_num_threads(), Builder(store.root, threads=1)
    for file in range(plan.num_files):
        builder.embed_file(plan, file)
    torch.testing.assert_close(torch.from_numpy(builder.encode(plan, TEXTS)), encoder.encode_query(TEXTS))
    torch.set_num_threads(threads)
    store.publish(plan)
    return store, plan


def test_documents_and_queries_have_each_their_prompt(tmp_path: Path, encoder: Encoder) -> None:
    store, plan = built(tmp_path, encoder)
    held = np.concatenate(store.open_vectors(plan, range(plan.num_files)))
    np.testing.assert_allclose(held, encoder.encode_document(TEXTS), atol=1e-3)
    [found] = IndexRetriever(LocalIndex(store.root, threads=1)).retrieve(["w3 w9"], 2)
    similarities = encoder.encode_query(["w3 w9"]) @ encoder.encode_document(TEXTS).T
    np.testing.assert_allclose(
        [one.similarity for one in found], similarities[0].sort(descending=True).values[:2], atol=2e-3
    )


@pytest.mark.parametrize("change", [{"document_prompt": "x"}, {"query_prompt": ""}, {"modules": "mean"}])
def test_another_prompt_or_chain_is_another_index(tmp_path: Path, encoder: Encoder, change: dict[str, str]) -> None:
    store, plan = built(tmp_path, encoder)
    other = replace(plan, **change)  # type: ignore[arg-type]
    assert other.retriever != plan.retriever
    [(name, value)] = change.items()
    with pytest.raises(UserError, match=f"{name} is {value!r}, but the index version in"):
        store.require_same_vectors(other)
