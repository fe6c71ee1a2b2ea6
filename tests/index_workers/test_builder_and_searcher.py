"""Embedding and searching without Ray, by builder and searcher or in the process that asks, against numpy."""

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.prepare.assembly import write_ids_of_shard
from replug.data.records import Document
from replug.data.shards import write_documents, write_token_rules
from replug.data.sources.built_in_texts import stand_in_texts
from replug.data.store import CorpusStore, PreparedSet
from replug.index_workers import searcher as searcher_module
from replug.index_workers.build import publish_snapshot, require_same_index
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.builder import Builder
from replug.index_workers.exact_search import merge_top_k
from replug.index_workers.local_index import IndexRetriever, LocalIndex, retriever_identity
from replug.index_workers.searcher import Searcher
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from tests.support.encoder_folders import write_chain, write_encoder
from tests.support.index_versions import begin_of
from tests.support.preparing import debug_set

K, NUM_DOCUMENTS, BLOCK_DOCUMENTS = 7, 62, 12  # six blocks in as many files, the last of two documents
TEXTS = [text.text for text, _ in zip(stand_in_texts(), range(NUM_DOCUMENTS), strict=False)]
QUERIES = [" ".join(text.split()[5 : 5 + length]) for text, length in zip(TEXTS[::9], range(4, 40, 4), strict=False)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The builder sets the threads of its process, which here is the tests' own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "documents"
    write_documents(path, [Document(f"d{i}", text, "x", "s") for i, text in enumerate(TEXTS)])
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("encoder")
    write_stand_in_encoder(folder)
    return Encoder(str(folder), max_tokens=100)


def make_plan(store: VersionStore, encoder: Encoder, corpus: Path, dtype: str = "float32") -> BuildPlan:
    return begin_of(store, encoder, corpus, block_documents=BLOCK_DOCUMENTS, dtype=dtype)


def build(store: VersionStore, plan: BuildPlan, files: list[int] | None = None) -> None:
    builder = Builder(store.root, threads=1)
    for file in files or range(plan.num_files):
        assert builder.embed_file(plan, file) > 0
    if not plan.kind.is_exact:
        builder.make_quantizer(plan)
        for shard in range(plan.num_shards):
            builder.build_shard(plan, shard)
    store.publish(plan)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder, corpus: Path) -> VersionStore:
    store = VersionStore(tmp_path_factory.mktemp("index"))
    build(store, make_plan(store, encoder, corpus))
    return store


def search(store: VersionStore, queries: np.ndarray, num_shards: int) -> tuple[np.ndarray, np.ndarray]:
    searchers = [Searcher(store.root, shard, num_shards, threads=1) for shard in range(num_shards)]
    assert sum(searcher.load(0) for searcher in searchers) == NUM_DOCUMENTS
    return merge_top_k([searcher.search(0, queries, K) for searcher in searchers], K)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_search_over_any_shards_is_a_brute_force_product(
    store: VersionStore, encoder: Encoder, num_shards: int
) -> None:
    queries = encoder.encode(QUERIES).numpy()
    documents = encoder.encode(TEXTS).numpy().astype(np.float16).astype(np.float32)
    products = queries @ documents.T
    expected = np.argsort(-products, axis=1)[:, :K]
    rows, similarities = search(store, queries, num_shards)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(similarities, np.take_along_axis(products, expected, axis=1), atol=1e-5)


def test_a_block_has_the_same_bytes_whoever_embeds_it(
    store: VersionStore, encoder: Encoder, corpus: Path, tmp_path: Path
) -> None:
    other = VersionStore(tmp_path / "index")
    plan = make_plan(other, encoder, corpus)
    Builder(other.root, threads=1).embed_file(plan, 4)  # a builder that dies after its first file
    build(other, plan, files=[5, 2, 0, 4, 3, 1])
    for file in range(plan.num_files):
        name = f"vectors-{file:05d}.npy"
        assert (other.folder(0) / name).read_bytes() == (store.folder(0) / name).read_bytes()


def test_token_ids_that_were_prepared_are_embedded_without_tokenizing(
    store: VersionStore, encoder: Encoder, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Path(shutil.copytree(corpus, tmp_path / "documents"))  # as `replug prepare` leaves it for a retriever
    write_ids_of_shard(prepared / "00000.arrow", encoder.token_rule)
    write_token_rules(prepared, encoder.token_rule.fingerprint)
    ids = CorpusStore(prepared).token_ids(range(NUM_DOCUMENTS))
    for found, expected in zip(ids, encoder.token_ids(TEXTS), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    other = VersionStore(tmp_path / "index")
    plan = make_plan(other, encoder, prepared)
    monkeypatch.setattr(Encoder, "token_ids", lambda *_: pytest.fail("tokenized again"))
    build(other, plan)
    for file in range(plan.num_files):
        assert other.vectors_path(0, file).read_bytes() == store.vectors_path(0, file).read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights_sha256": "0" * 64}, r"differs from the encoder that index version 0 was begun with; remove .*v0"),
        ({"num_documents": 63}, r"documents holds 62 documents, but index version 0 was begun over 63: put that"),
    ],
)
def test_a_plan_that_encoder_or_corpus_do_not_fit_is_refused(
    encoder: Encoder, corpus: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    store = VersionStore(tmp_path / "index")
    plan = replace(make_plan(store, encoder, corpus), **changed)
    with pytest.raises(UserError, match=message):
        Builder(store.root, threads=1).embed_file(plan, 0)
    assert not store.vectors_path(0, 0).exists()


def test_an_encoder_whose_arithmetic_float16_cannot_hold_is_refused_with_the_key(corpus: Path, tmp_path: Path) -> None:
    """Its unit vectors are fine in float32: 65,504 is exceeded on the way."""
    write_stand_in_encoder(tmp_path / "encoder")
    large = Encoder(str(tmp_path / "encoder"), "cosine", max_tokens=100)
    with torch.no_grad():
        large.backbones[0].encoder.layer[-1].output.LayerNorm.weight.mul_(1e6)
    store = VersionStore(tmp_path / "float16")
    plan = make_plan(store, large, corpus, dtype="float16")
    with pytest.raises(ValueError, match=r"in index.dtype=float16: take bfloat16 or float32"):
        Builder(store.root, threads=1).embed_file(plan, 0)
    store = VersionStore(tmp_path / "bfloat16")
    Builder(store.root, threads=1).embed_file(make_plan(store, large, corpus, dtype="bfloat16"), 0)


class WaitingShard:
    """Answers once it is let on."""

    is_independent = True

    def __init__(self) -> None:
        self.begun, self.let_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.begun.set()
        assert self.let_on.wait(100)
        return np.tile(np.arange(k), (len(queries), 1)), np.zeros((len(queries), k), np.float32)


def test_a_search_under_way_ends_on_the_version_it_began_on(store: VersionStore, monkeypatch) -> None:
    shard = WaitingShard()
    monkeypatch.setattr(searcher_module, "open_shard", lambda *_: shard)
    searcher = Searcher(store.root, 0, 1, threads=1)
    searcher.load(0)
    with ThreadPoolExecutor(1) as threads:
        results = threads.submit(searcher.search, 0, np.ones((1, 4), np.float32), 3)
        assert shard.begun.wait(100)
        searcher.release(keep=[])
        assert searcher._versions == {}
        shard.let_on.set()
        assert results.result(100)[0].tolist() == [[0, 1, 2]]


def test_loading_yields_to_searches_in_a_process_of_low_priority(store: VersionStore, monkeypatch) -> None:
    """Ray's workers run at 15, and only root may raise a priority: a fixed one ended everybody else's training."""
    priorities = []

    def open_shard(*_: object) -> WaitingShard:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return WaitingShard()

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        Searcher(store.root, 0, 1, threads=1).load(0)

    monkeypatch.setattr(searcher_module, "open_shard", open_shard)
    with ThreadPoolExecutor(1) as thread:  # of its own, since it keeps the priority
        thread.submit(load).result()
    assert priorities == [19]


# In the process that asks ---------------------------------------------------------------------------------------------

DIMS = 8
TEXT_QUERIES = ["mida furo", "pelo tana", "furo furo mida"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return debug_set(tmp_path_factory.mktemp("data"), "data.num_documents=100")


def local_index(config: Config, data: PreparedSet, root: Path, dims: int | None, kind: str) -> LocalIndex:
    config = replace(config, index=replace(config.index, dims=dims, kind=kind))
    store = VersionStore(root)
    root.mkdir()
    plan = publish_snapshot(config, load_encoder(config.retriever, dims=dims), data, store, IndexState(0, 0))
    store.begin(plan)
    build(store, plan)
    return LocalIndex(root, threads=1)


@pytest.mark.parametrize("kind", ["flat_fp16", "sq8"])
def test_a_search_is_exact_search_by_truncated_vectors_of_length_one(debug_config, data, tmp_path, kind):
    """A lossy kind's candidates are ordered by the stored vectors, so that its similarities are the exact ones too."""
    index = local_index(debug_config, data, tmp_path / "index", DIMS, kind)
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
    first = local_index(debug_config, data, tmp_path / "first", DIMS, "flat_fp16")
    whole = local_index(debug_config, data, tmp_path / "whole", None, "flat_fp16")
    assert first.plan.weights_sha256 == whole.plan.weights_sha256
    identities = [retriever_identity(index.plan, index.root) for index in (first, whole)]
    assert identities[0] == f"{identities[1]}:first {DIMS}"
    with pytest.raises(UserError, match=r"dim is 32, but the index version in .* was made with 8"):
        require_same_index(debug_config, load_encoder(debug_config.retriever), data, VersionStore(tmp_path / "first"))


def test_documents_and_queries_have_each_their_prompt(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder", "bert")
    pooling = {"pooling_mode": ["mean", "cls"], "include_prompt": False}
    write_chain(tmp_path / "encoder", pooling, ["Dense"], {"query": "query : ", "passage": "passage : "})
    encoder = Encoder(str(tmp_path / "encoder"))
    texts = [f"w{n} w{n + 7} w{n + 9}" for n in range(12)]  # of its words
    write_documents(tmp_path / "documents", [Document(f"d{n}", text, "x", "s") for n, text in enumerate(texts)])
    store = VersionStore(tmp_path / "index")
    plan = make_plan(store, encoder, tmp_path / "documents")
    build(store, plan)
    queries, documents = encoder.encode_query(texts), encoder.encode_document(texts)
    np.testing.assert_allclose(Builder(store.root, threads=1).encode(plan, texts), queries, atol=1e-5)
    held = np.concatenate(store.open_vectors(plan, range(plan.num_files)))
    np.testing.assert_allclose(held, documents, atol=1e-3)
    [found] = IndexRetriever(LocalIndex(store.root, threads=1)).retrieve(texts[3:4], 2)
    best = (queries[3] @ documents.T).sort(descending=True).values[:2]
    np.testing.assert_allclose([document.similarity for document in found], best, atol=2e-3)
    for change in ({"document_prompt": "x"}, {"query_prompt": ""}, {"modules": "mean"}):
        other = replace(plan, **change)  # type: ignore[arg-type]
        assert other.retriever != plan.retriever
        [(name, value)] = change.items()
        with pytest.raises(UserError, match=f"{name} is {value!r}, but the index version in"):
            store.require_same_vectors(other)
