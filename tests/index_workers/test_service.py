"""Build, search, swap and survive, on real Ray actors with real kill -9."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from configs.load import load_config
from configs.schema import Config
from data.store import PreparedSet
from index_workers.service import IndexService, IndexSettings
from index_workers.version_store import BuildPlan
from models.encoder import Encoder
from train import wiring
from train.pipeline import IndexState

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def data(folder: Path) -> PreparedSet:
    return wiring.prepared_set(load_config(ROOT / "configs/debug.yaml"), folder / "data")


@pytest.fixture
def encoder(debug_config: Config) -> Encoder:
    return wiring.load_encoder(debug_config)


@pytest.fixture(scope="module")
def service(folder: Path, ray_session: None) -> Iterator[IndexService]:
    """One for all tests, since actors take seconds to start; each test takes `versions` of its own."""
    service = IndexService(folder / "index", IndexSettings(num_shards=2, num_builders=2, threads=1))
    yield service
    service.close()


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count()


def publish(config: Config, encoder: Encoder, data: PreparedSet, service: IndexService, version: int) -> BuildPlan:
    return wiring.publish_snapshot(config, encoder, data, service.store, IndexState(version, version * 10))


def moved(encoder: Encoder) -> Encoder:
    """The encoder after what stands for training."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    return encoder


def exact(encoder: Encoder, data: PreparedSet, queries: np.ndarray, k: int) -> np.ndarray:
    """Rows by brute force over float16 vectors, as they are stored."""
    vectors = encoder.encode([doc.text for doc in data.corpus.iterate()]).numpy()
    similarities = queries @ vectors.astype(np.float16).astype(np.float32).T
    return np.argsort(-similarities, axis=1, kind="stable")[:, :k]


def test_search_over_shards_equals_brute_force(debug_config, data, encoder, service, versions):
    version = next(versions)
    service.build(publish(debug_config, encoder, data, service, version)).result(60)
    service.prepare(version)
    queries = encoder.encode([window.context for window in data.heldout.windows()]).numpy()
    found = service.search(version, queries, 10)
    assert found.index_version == version
    same = [set(a) == set(b) for a, b in zip(found.doc_rows, exact(encoder, data, queries, 10), strict=True)]
    assert np.mean(same) > 0.95  # float16 ties at the border may fall either way
    assert (np.diff(found.similarities, axis=1) <= 0).all()


def test_searches_go_on_during_a_refresh_and_answer_from_one_version_each(
    debug_config, data, encoder, service, versions
):
    old, new = next(versions), next(versions)
    service.build(publish(debug_config, encoder, data, service, old)).result(60)
    service.prepare(old)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(old, queries, 5)
    live, answers, stop = [old], [], threading.Event()

    def search_all_the_time() -> None:
        while not stop.is_set():
            answers.append(service.search(live[0], queries, 5))

    thread = threading.Thread(target=search_all_the_time)
    thread.start()
    service.build(publish(debug_config, moved(encoder), data, service, new)).result(60)
    service.prepare(new)
    live[0] = new
    time.sleep(0.3)
    stop.set()
    thread.join(30)
    after = service.search(new, queries, 5)
    assert len(answers) > 10
    assert {answer.index_version for answer in answers} == {old, new}
    for answer in answers:
        expected = before if answer.index_version == old else after
        assert answer.doc_rows.tolist() == expected.doc_rows.tolist()
        assert answer.similarities.tolist() == expected.similarities.tolist()
    assert before.similarities.tolist() != after.similarities.tolist()
    first_blocks = [next(service.store.read_blocks(version, [0])) for version in (old, new)]
    assert not np.array_equal(*first_blocks)


def test_a_killed_searcher_comes_back_with_the_live_version(debug_config, data, encoder, service, versions):
    version = next(versions)
    service.build(publish(debug_config, encoder, data, service, version)).result(60)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(version, queries, 8)
    os.kill(pid_of(service.searchers[0]), signal.SIGKILL)
    after = service.search(version, queries, 8)
    assert after.doc_rows.tolist() == before.doc_rows.tolist()
    assert after.similarities.tolist() == before.similarities.tolist()


def test_killed_builders_leave_the_same_bytes(debug_config, data, encoder, service, versions):
    quiet = publish(debug_config, encoder, data, service, next(versions))
    service.build(quiet).result(60)
    stormy = publish(debug_config, encoder, data, service, next(versions))
    pids = [pid_of(handle) for handle in service.builders.handles()]
    building = service.build(stormy)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    building.result(120)
    assert service.builders.counts.respawns >= 1
    for block in range(quiet.num_blocks):
        name = f"block-{block:05d}.npy"
        paths = [service.store.folder(plan.version) / name for plan in (quiet, stormy)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_an_interrupted_build_goes_on_after_its_marked_blocks(debug_config, data, encoder, service, versions):
    plan = publish(debug_config, encoder, data, service, next(versions))
    service.build(plan).result(60)
    folder = service.store.folder(plan.version)
    (folder / "manifest.json").unlink()
    (folder / "block-00002.json").unlink()
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("block-*.npy")}
    assert not service.store.is_published(plan.version)
    service.build(plan).result(60)
    changed = [path.name for path in folder.glob("block-*.npy") if path.stat().st_mtime_ns != stamps[path.name]]
    assert changed == ["block-00002.npy"]
    assert service.store.is_published(plan.version)


def test_a_version_that_is_not_published_cannot_be_searched(debug_config, data, encoder, service, versions):
    plan = publish(debug_config, encoder, data, service, next(versions))
    service.store.begin(plan)
    with pytest.raises(ValueError, match=f"version {plan.version} is not published"):
        service.search(plan.version, encoder.encode(["x"]).numpy(), 3)


def test_an_encoder_that_diverged_fails_the_build_and_names_documents(debug_config, data, encoder, service, versions):
    with torch.no_grad():
        next(encoder.parameters()).fill_(float("nan"))
    plan = publish(debug_config, encoder, data, service, next(versions))
    with pytest.raises(ValueError, match=r"float16 cannot hold.*first text-\d+#\d+"):
        service.build(plan).result(60)
    assert not service.store.is_published(plan.version)


def pid_of(actor: ray.actor.ActorHandle) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
