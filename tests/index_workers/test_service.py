"""Build, search, swap and survive, on real Ray actors with real kill -9."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from configs.schema import Config
from data.store import PreparedSet
from index_workers.service import IndexService, IndexSettings
from index_workers.version_store import BuildPlan
from models.encoder import Encoder
from train import wiring
from train.pipeline import IndexState

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(180)]


@pytest.fixture
def data(debug_config: Config, tmp_path: Path) -> PreparedSet:
    return wiring.prepared_set(debug_config, tmp_path / "data")


@pytest.fixture
def encoder(debug_config: Config) -> Encoder:
    return wiring.load_encoder(debug_config)


@pytest.fixture
def service(tmp_path: Path):
    service = IndexService(tmp_path / "index", IndexSettings(num_shards=2, num_builders=2, threads=1))
    yield service
    service.close()


def publish(
    config: Config, encoder: Encoder, data: PreparedSet, service: IndexService, version: int
) -> BuildPlan:
    return wiring.publish_snapshot(config, encoder, data, service.store, IndexState(version, version * 10))


def moved(encoder: Encoder) -> Encoder:
    """The encoder after what stands for training."""
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.5 * torch.randn_like(weight, generator=None))
    return encoder


def exact(encoder: Encoder, data: PreparedSet, queries: np.ndarray, k: int) -> np.ndarray:
    """Rows by brute force over float16 vectors, as they are stored."""
    vectors = encoder.encode([doc.text for doc in data.corpus.iterate()]).numpy()
    similarities = queries @ vectors.astype(np.float16).astype(np.float32).T
    return np.argsort(-similarities, axis=1, kind="stable")[:, :k]


def test_search_over_shards_equals_brute_force(debug_config, data, encoder, service):
    service.build(publish(debug_config, encoder, data, service, 0)).result(60)
    service.prepare(0)
    queries = encoder.encode([window.context for window in data.heldout.windows()]).numpy()
    found = service.search(0, queries, 10)
    assert found.index_version == 0
    same = [set(a) == set(b) for a, b in zip(found.doc_rows, exact(encoder, data, queries, 10), strict=True)]
    assert np.mean(same) > 0.95  # float16 ties at the border may fall either way
    assert (np.diff(found.similarities, axis=1) <= 0).all()


def test_searches_go_on_during_a_refresh_and_answer_from_one_version_each(debug_config, data, encoder, service):
    service.build(publish(debug_config, encoder, data, service, 0)).result(60)
    service.prepare(0)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(0, queries, 5)
    live, answers, stop = [0], [], threading.Event()

    def search_all_the_time() -> None:
        while not stop.is_set():
            answers.append(service.search(live[0], queries, 5))

    thread = threading.Thread(target=search_all_the_time)
    thread.start()
    torch.manual_seed(0)
    service.build(publish(debug_config, moved(encoder), data, service, 1)).result(60)
    service.prepare(1)
    live[0] = 1
    time.sleep(0.3)
    stop.set()
    thread.join(30)
    after = service.search(1, queries, 5)
    assert len(answers) > 10
    assert {answer.index_version for answer in answers} == {0, 1}
    for answer in answers:
        expected = before if answer.index_version == 0 else after
        assert answer.doc_rows.tolist() == expected.doc_rows.tolist()
        assert answer.similarities.tolist() == expected.similarities.tolist()
    assert before.similarities.tolist() != after.similarities.tolist()
    assert not np.array_equal(service.store.vectors(0, np.arange(5)), service.store.vectors(1, np.arange(5)))


def test_a_killed_searcher_comes_back_with_the_live_version(debug_config, data, encoder, service):
    service.build(publish(debug_config, encoder, data, service, 0)).result(60)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(0, queries, 8)
    for searcher in service.searchers:
        ray.kill(searcher, no_restart=False)
        after = service.search(0, queries, 8)
        assert after.doc_rows.tolist() == before.doc_rows.tolist()


def test_killed_builders_leave_the_same_bytes(debug_config, data, encoder, service, tmp_path):
    quiet = publish(debug_config, encoder, data, service, 0)
    service.build(quiet).result(60)
    stormy = publish(debug_config, encoder, data, service, 1)
    building = service.build(stormy)
    for handle in service.builders.handles():
        ray.kill(handle)
    building.result(120)
    assert service.builders.num_respawns >= 1
    for block in range(quiet.num_blocks):
        name = f"block-{block:05d}.npy"
        assert (service.store.folder(0) / name).read_bytes() == (service.store.folder(1) / name).read_bytes()


def test_an_interrupted_build_goes_on_after_its_marked_blocks(debug_config, data, encoder, service):
    plan = publish(debug_config, encoder, data, service, 0)
    service.build(plan).result(60)
    folder = service.store.folder(0)
    (folder / "manifest.json").unlink()
    (folder / "block-00002.json").unlink()
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("block-*.npy")}
    assert service.store.published() == []
    service.build(plan).result(60)
    changed = [path.name for path in folder.glob("block-*.npy") if path.stat().st_mtime_ns != stamps[path.name]]
    assert changed == ["block-00002.npy"]
    assert service.store.published() == [0]


def test_a_version_that_is_not_published_cannot_be_searched(debug_config, data, encoder, service):
    plan = publish(debug_config, encoder, data, service, 0)
    service.store.begin(plan)
    with pytest.raises(ValueError, match="version 0 is not published"):
        service.search(0, encoder.encode(["x"]).numpy(), 3)


def test_an_encoder_that_diverged_fails_the_build_and_names_documents(debug_config, data, encoder, service):
    with torch.no_grad():
        next(encoder.parameters()).fill_(float("nan"))
    building = service.build(publish(debug_config, encoder, data, service, 0))
    with pytest.raises(ValueError, match="float16 cannot hold"):
        building.result(60)
    assert service.store.published() == []


def test_kill_minus_nine_of_a_builder_process_is_survived(debug_config, data, encoder, service):
    pids = [ray.get(h.__ray_call__.remote(lambda self: os.getpid()), timeout=60) for h in service.builders.handles()]
    building = service.build(publish(debug_config, encoder, data, service, 0))
    os.kill(pids[0], signal.SIGKILL)
    building.result(120)
    assert service.store.published() == [0]
