"""Build, search, swap and survive, on real Ray actors with real kill -9."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from replug.cluster.layout import IndexActors
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.kinds import IndexKind
from replug.index_workers.service import IndexService, SearcherGroup
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from tests.support.preparing import debug_set

COARSE = {"kind": IndexKind("IVF16,SQ8", nprobe=1), "num_shards": 2}
pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return debug_set(tmp_path_factory.mktemp("data"))


@pytest.fixture
def encoder(debug_config: Config) -> Encoder:
    return load_encoder(debug_config.retriever)


@pytest.fixture(scope="module")
def service(data: PreparedSet, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[IndexService]:
    """One for all tests, since actors take seconds to start; each test takes `versions` of its own."""
    texts = [example.context for example in data.queries.examples(range(16))]
    service = IndexService(tmp_path_factory.mktemp("index"), texts, 10, IndexActors(num_shards=2, num_builders=1))
    yield service
    service.close()


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count()


def publish(
    config: Config, encoder: Encoder, data: PreparedSet, service: IndexService, version: int, **changes: object
) -> BuildPlan:
    plan = publish_snapshot(config, encoder, data, service.store, IndexState(version, version * 10))
    return replace(plan, block_documents=128, **changes)  # type: ignore[arg-type] # several files


def moved(encoder: Encoder, by: float = 0.5) -> Encoder:
    """The encoder after what stands for training."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator))
    return encoder


def test_searches_go_on_during_a_refresh_and_answer_from_one_version_each(
    debug_config, data, encoder, service, versions
):
    old, new = next(versions), next(versions)
    service.build(publish(debug_config, encoder, data, service, old)).result(300)
    service.prepare(old)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(old, queries, 5)
    live, answers, stop = [old], [], threading.Event()

    def search_all_the_time() -> None:
        while not stop.is_set():
            answers.append(service.search(live[0], queries, 5))

    plan = publish(debug_config, moved(encoder), data, service, new)
    thread = threading.Thread(target=search_all_the_time)
    thread.start()
    wait_until(lambda: answers)
    answered = len(answers)
    service.refresh(plan, old).result(300)
    assert len(answers) > answered, "none was answered while the version was made and loaded"
    live[0] = new
    wait_until(lambda: answers[-1].index_version == new and len(answers) > 10)
    stop.set()
    thread.join(300)
    after = service.search(new, queries, 5)
    assert {answer.index_version for answer in answers} == {old, new}
    for answer in answers:
        expected = before if answer.index_version == old else after
        assert answer.doc_rows.tolist() == expected.doc_rows.tolist()
        assert answer.similarities.tolist() == expected.similarities.tolist()
    assert before.similarities.tolist() != after.similarities.tolist()
    first_blocks = [service.store.open_vectors(service.store.plan(version), [0])[0] for version in (old, new)]
    assert not np.array_equal(*first_blocks)


def test_a_refresh_says_how_it_was_made_and_how_far_the_index_moved(debug_config, data, encoder, service, versions):
    old, same, other = next(versions), next(versions), next(versions)
    service.build(publish(debug_config, encoder, data, service, old)).result(300)
    unmoved = service.refresh(publish(debug_config, encoder, data, service, same), old).result(300)
    assert (unmoved.recall, unmoved.overlap) == (1, 1)
    assert unmoved.build_seconds > 0
    little = moved(encoder, by=0.1)  # so that some of what was found is found again
    refreshed = service.refresh(publish(debug_config, little, data, service, other), same).result(300)
    assert refreshed.recall == 1
    assert 0 < refreshed.overlap < 1


def test_a_lossy_kind_is_measured_against_the_exact_answer(debug_config, data, encoder, service, versions):
    old, coarse, fine = next(versions), next(versions), next(versions)
    service.build(publish(debug_config, encoder, data, service, old)).result(300)
    lossy = service.refresh(publish(debug_config, encoder, data, service, coarse, **COARSE), old).result(300)
    assert 0.1 < lossy.recall < 1
    assert lossy.overlap == lossy.recall  # the version before was exact, with the same vectors
    every_list = {"kind": IndexKind("IVF16,SQ8", nprobe=16, overretrieve=8), "num_shards": 2}
    whole = service.refresh(publish(debug_config, encoder, data, service, fine, **every_list), coarse).result(300)
    assert whole.recall == 1
    queries = encoder.encode([example.context for example in data.heldout.examples()]).numpy()
    ours, exactly = service.search(fine, queries, 10), service.search(old, queries, 10)
    assert ours.doc_rows.tolist() == exactly.doc_rows.tolist()
    assert ours.similarities.tolist() == exactly.similarities.tolist()


def test_a_killed_searcher_comes_back_with_the_live_version(debug_config, data, encoder, service, versions):
    version = next(versions)
    service.build(publish(debug_config, encoder, data, service, version)).result(300)
    queries = encoder.encode(["some words"]).numpy()
    before = service.search(version, queries, 8)
    os.kill(pid_of(service.searchers.actors[0]), signal.SIGKILL)
    after = service.search(version, queries, 8)
    assert after.doc_rows.tolist() == before.doc_rows.tolist()
    assert after.similarities.tolist() == before.similarities.tolist()


class LateSearcher:
    """Answers after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self._seconds)
        return np.full((len(queries), k), version), np.zeros((len(queries), k), np.float32)


@pytest.mark.slow
def test_a_searcher_that_hangs_is_waited_for_once():
    late = ray.remote(num_cpus=0)(LateSearcher)
    hanging, working, other = (late.remote(seconds) for seconds in (600, 0, 0))
    ray.get([actor.__ray_ready__.remote() for actor in (hanging, working, other)], timeout=300)
    actors = {0: [hanging, working], 1: [other]}
    with closing(SearcherGroup(lambda shard: actors[shard].pop(0), 2, timeout_seconds=5)) as group:
        began = time.monotonic()
        assert group.search(7, np.zeros((3, 4), np.float32), 5)[0].tolist() == [[7] * 5] * 3
        assert 5 <= time.monotonic() - began < 9
        assert group.actors == [working, other]


@pytest.mark.slow
def test_a_killed_builder_leaves_the_same_bytes(debug_config, data, encoder, service, versions):
    quiet = publish(debug_config, encoder, data, service, next(versions))
    service.build(quiet).result(300)
    stormy = publish(debug_config, encoder, data, service, next(versions))
    pid = pid_of(service.builders.handles()[0])
    os.kill(pid, signal.SIGSTOP)  # else it may all be done before it is killed
    building = service.build(stormy)
    os.kill(pid, signal.SIGKILL)
    building.result(300)
    assert service.builders.num_respawns >= 1
    for file in range(quiet.num_files):
        paths = [service.store.vectors_path(plan.version, file) for plan in (quiet, stormy)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_an_interrupted_build_goes_on_after_its_marked_blocks(debug_config, data, encoder, service, versions):
    plan = publish(debug_config, encoder, data, service, next(versions))
    service.build(plan).result(300)
    folder = service.store.folder(plan.version)
    (folder / "manifest.json").unlink()
    (folder / "vectors-00002.json").unlink()
    paths = [service.store.vectors_path(plan.version, file) for file in range(plan.num_files)]
    stamps = [path.stat().st_mtime_ns for path in paths]
    assert not service.store.is_published(plan.version)
    service.build(plan).result(300)
    changed = [path.name for path, before in zip(paths, stamps, strict=True) if path.stat().st_mtime_ns != before]
    assert changed == ["vectors-00002.npy"]
    assert service.store.is_published(plan.version)


def test_a_version_that_was_loaded_in_part_does_not_answer_for_the_next_of_its_number(
    debug_config, data, encoder, service, versions, monkeypatch
):
    live, number = next(versions), next(versions)
    service.build(publish(debug_config, encoder, data, service, live)).result(300)
    plan = publish(debug_config, encoder, data, service, number)
    last_block = service.store.vectors_path(number, plan.num_files - 1)
    with monkeypatch.context() as patch:
        publish_version = service.store.publish
        patch.setattr(service.store, "publish", lambda plan: (publish_version(plan), last_block.unlink()))
        with pytest.raises(UserError, match=f"{last_block} is missing"):
            service.refresh(plan, live).result(300)
    service.refresh(publish(debug_config, moved(encoder), data, service, number), live).result(300)
    queries = encoder.encode(["some words"]).numpy()
    found = service.search(number, queries, 5)
    vectors = encoder.encode([doc.text for doc in data.corpus.iterate()]).numpy().astype(np.float16)
    expected = np.argsort(-(queries[0] @ vectors.astype(np.float32).T))[:5]
    assert set(found.doc_rows[0]) == set(expected)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def pid_of(actor: ray.actor.ActorHandle) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=300)
