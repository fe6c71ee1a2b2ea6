"""The estimate of storage beside files that the stores themselves have written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import build_plan
from replug.index_workers.build_plan import IndexState
from replug.index_workers.builder import Builder
from replug.index_workers.kinds import resolve_kind
from replug.index_workers.version_store import VersionStore
from replug.models.black_box_lm import ContinuationScore, sum_of
from replug.models.build import load_encoder
from replug.models.preparing import prepared_set
from replug.models.score_cache import ScoreCache
from replug.planning.model_sizes import encoder_size
from replug.planning.pace import job_of
from replug.planning.training import disk_gb
from replug.planning.workload import (
    NAME_BYTES,
    SCORE_BYTES,
    documents_bytes,
    examples_bytes,
    index_size,
    version_bytes,
)

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "data.source=package:numpy_docstrings",
    "data.document_tokens=64",
    "data.context_tokens=32",
    "data.num_queries=400",
    "index.block_documents=256",
]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ROOT / "configs/debug.yaml", SETTINGS)


@pytest.fixture(scope="module")
def prepared(config: Config, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """Real texts, in the tokens of a stand-in, which are words."""
    return prepared_set(config, tmp_path_factory.mktemp("prepared") / "data")


def num_bytes(*paths: Path) -> int:
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return sum(file.stat().st_size for file in files)


def utf8(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def test_a_prepared_corpus_takes_the_bytes_estimated(prepared: PreparedSet, config: Config) -> None:
    documents = list(prepared.corpus.iterate())
    texts = np.mean([utf8(one.text) for one in documents])
    names = np.mean([utf8(one.id, one.domain, one.source) for one in documents])
    tokens = np.mean([len(ids) for ids in prepared.corpus.token_ids(range(len(documents)))])
    vocabulary = encoder_size("stand_in").vocabulary
    estimated = documents_bytes(len(documents), float(texts), float(tokens), vocabulary, float(names))
    assert len(documents) > 1000
    assert estimated == pytest.approx(num_bytes(prepared.corpus_path), rel=0.02)
    assert 0.5 < names / NAME_BYTES < 2


def test_prepared_training_texts_take_the_bytes_estimated(prepared: PreparedSet) -> None:
    examples = prepared.queries.examples()
    texts = np.mean([utf8(one.context, one.continuation) for one in examples])
    names = np.mean([utf8(one.id, one.domain, one.source) for one in examples])
    estimated = examples_bytes(len(examples), float(texts), float(names))
    assert estimated == pytest.approx(num_bytes(prepared.folder / "queries.arrow"), rel=0.03)


@pytest.mark.parametrize("kind", ["flat_fp16", "pq", "ivf_sq8"])
def test_an_index_version_takes_the_bytes_estimated(
    kind: str, prepared: PreparedSet, config: Config, tmp_path: Path
) -> None:
    rows, dim, shards = 20_000, 64, 2
    config = replace(config, index=replace(config.index, kind=kind, num_shards=shards))
    store, encoder = VersionStore(tmp_path), load_encoder(config.retriever)
    digest = store.save_snapshot(0, encoder.save)
    small = build_plan(config, encoder, prepared, store, IndexState(0, 0), digest)
    size = index_size(config, dim, rows)
    factory = small.kind.factory and resolved_factory(config, dim, rows)
    plan = replace(small, num_documents=rows, dim=dim, kind=replace(small.kind, factory=factory))
    random = np.random.default_rng(0)
    missing = store.begin(plan)
    for file in missing.files:
        store.write_vectors(0, file, random.normal(size=(len(plan.rows_of_file(file)), dim)))
    if missing.quantizer:
        Builder(store.root, 1).make_quantizer(plan)
    for shard in missing.shards:
        Builder(store.root, 1).build_shard(plan, shard)
    store.publish(plan)
    parameters = sum(weight.numel() for weight in encoder.parameters())
    estimated = version_bytes(rows, dim, parameters, config.index.block_documents, size, shards)
    assert estimated == pytest.approx(num_bytes(store.folder(0)), rel=0.03)


def resolved_factory(config: Config, dim: int, rows: int) -> str | None:
    return resolve_kind(config.index.kind, dim, rows, None, True).factory


def test_the_cache_of_scores_takes_the_bytes_estimated(tmp_path: Path) -> None:
    random, cache = np.random.default_rng(0), ScoreCache(tmp_path / "scores.sqlite")
    for _ in range(100):  # units of 200 pairs, as a replica answers them, without their tokens
        scores = [ContinuationScore(random.normal(size=8).astype(np.float32)) for _ in range(200)]
        cache.store("lm", {random.bytes(16): sum_of(score) for score in scores})
    cache.close()
    assert pytest.approx(num_bytes(tmp_path), rel=0.05) == 20_000 * SCORE_BYTES


def test_the_papers_run_holds_three_versions_of_its_vectors(paper: Config) -> None:
    """55.3 GB of float16 numbers each, with 0.4 GB of weights: live, the one before, and the one under way."""
    assert disk_gb(job_of(paper))["index_versions"] == pytest.approx(3 * (55.3 + 0.45), rel=0.002)
