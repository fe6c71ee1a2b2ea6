"""Refreshes that fail, on a real service with real Ray: the file is named, the live index goes on serving, and the
next refresh is as if nothing had been. `test_failing_runs.py` has whole runs.
"""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch

from replug.cluster.layout import IndexActors
from replug.config import refresh_policy
from replug.config.errors import RunError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.kinds import IndexKind
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import Missing
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.preparing import prepared_set
from replug.train.refresh import RefreshController
from replug.train.sources import LiveBatches
from replug.train.step_metrics import StepClock
from tests.support.command_line import ROOT
from tests.support.index_versions import PLAN, flip, written_before
from tests.support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.slow

TEXTS = ["some words of a query", "others that are not the same"]
FLAT, LOSSY = "flat_fp16", "IVF8,SQ8"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return prepared_set(load_config(ROOT / "configs/debug.yaml"), tmp_path_factory.mktemp("data") / "data")


@contextmanager
def service_in(folder: Path) -> Iterator[IndexService]:
    service = IndexService(folder, ["a text"], 5, IndexActors(num_shards=2, num_builders=2))
    yield service
    service.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[IndexService]:
    """One for all tests but those of full disks, since actors take seconds; each test takes `versions` of its own."""
    with service_in(tmp_path_factory.mktemp("failures") / "index") as service:
        yield service


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        yield disk


@pytest.fixture
def service_on_disk(disk: SmallDisk, ray_session: None) -> Iterator[IndexService]:
    """Its own: actors give the space of files that were removed back when they please."""
    with service_in(disk.folder) as service:
        yield service


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(0, 10)


class Trainer:
    """What the trainer does at its step boundaries, and what it asks the index, with every wait bounded."""

    def __init__(self, config: Config, data: PreparedSet, service: IndexService, version: int) -> None:
        self.config, self.data, self.service = config, data, service
        self.encoder = load_encoder(config.retriever)
        plan = publish_snapshot(config, self.encoder, data, service.store, IndexState(version, 0))
        service.build(plan).result(300)
        service.prepare(version)
        self.control = self.new_control()
        self.control.live = IndexState(version, 0)
        service.commit(version)

    def new_control(self) -> RefreshController:
        workers = SimpleNamespace(index=self.service, lm=SimpleNamespace(submit_sums=None), template=None)
        parts = (self.config, self.data, self.encoder, workers, None, StepClock(), lambda: None)
        return LiveBatches(*parts)._refresh

    def step_to(self, *steps: int) -> None:
        """A boundary, then what training does to the weights."""
        for step in steps:
            self.control.at_boundary(step)
            move(self.encoder, step)

    def ask(self) -> tuple[list, list]:
        found = self.service.search(self.control.live.version, queries_of(self.encoder), 8)
        return found.doc_rows.tolist(), found.similarities.tolist()

    def serves_its_files(self) -> bool:
        """Whether the searchers answer what the live version's files say, read here."""
        store, live = self.service.store, self.control.live.version
        store.remove_all_but({live})
        rows, similarities = LocalIndex(store.root, 1).search(queries_of(self.encoder), 8)
        return self.ask() == (rows.tolist(), similarities.tolist())

    def last_error(self) -> str:
        return str(self.control._last_error)


def move(encoder: Encoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def queries_of(encoder: Encoder) -> np.ndarray:
    return encoder.encode(TEXTS).numpy()


def trainer_of(tmp_path: Path, data: PreparedSet, service: IndexService, version: int, kind: str = FLAT) -> Trainer:
    """Refreshes start at steps 10, 20, ... and are adopted three later."""
    keys = ["refresh.every_steps=10", "train.max_steps=99", "index.num_shards=2"]
    overrides = [f"run_dir={tmp_path / 'run'}", f"index.kind={kind}", *keys]
    return Trainer(load_config(ROOT / "configs/debug.yaml", overrides), data, service, version)


# A file of a lossy kind, and of the vectors.
FULL_AT = [
    (LOSSY, "shard-00001.faiss", r"shard-0000[01]\.faiss\.\S*partial"),
    (FLAT, "vectors-00000.npy", r"vectors-000\d\d\.\S*partial"),
]


@pytest.mark.root
@pytest.mark.parametrize(("kind", "name", "named"), FULL_AT)
def test_a_disk_that_is_full_leaves_the_live_index_serving_until_it_is_too_old(
    tmp_path, data, disk, service_on_disk, kind, name, named, monkeypatch
):
    monkeypatch.setattr(refresh_policy, "INTERVALS_TO_STOP", 1.5)
    trainer = trainer_of(tmp_path, data, service_on_disk, version := 0, kind)
    store = service_on_disk.store
    disk.leave(written_before(store, store.plan(version), name))
    trainer.step_to(9, 10, 11, 12, 13)
    assert trainer.control.live.version == version and trainer.control.num_failed == 1
    assert re.search(rf"{named} cannot be written: .*", trainer.last_error()), trainer.last_error()
    assert "No space left" in trainer.last_error() or "written" in trainer.last_error()
    assert [str(path) for path in disk.folder.rglob("*.partial*")] == []
    trainer.step_to(14, 15)  # training goes on with what there is
    with pytest.raises(RunError, match=rf"step 16: index v{version} is 16 steps old.*{named}"):
        trainer.control.at_boundary(16)
    disk.free()
    state, trainer.control = trainer.control.state(), trainer.new_control()  # as the same command does
    trainer.control.restore(state)
    trainer.step_to(16)
    assert trainer.control.live == IndexState(version + 1, 16)
    trainer.step_to(17, 20, 21, 23)
    assert trainer.control.live == IndexState(version + 2, 20)
    assert trainer.serves_its_files()


DAMAGES = [
    (FLAT, "vectors-00010.npy", Path.unlink),  # half copied; of the second shard: the first one loads its own
    (LOSSY, "shard-00001.faiss", flip),
]


@pytest.mark.parametrize(("kind", "name", "damage"), DAMAGES)
def test_damage_between_building_and_loading_is_named_and_never_served(
    tmp_path, data, service, versions, monkeypatch, kind, name, damage
):
    trainer = trainer_of(tmp_path, data, service, version := next(versions), kind)
    service.store.remove_all_but({version})
    publish = service.store.publish

    def publish_and_damage(plan: BuildPlan) -> None:
        publish(plan)
        damage(service.store.folder(plan.version) / name)

    monkeypatch.setattr(service.store, "publish", publish_and_damage)
    trainer.step_to(10, 11, 12, 13)
    monkeypatch.undo()
    assert trainer.control.live.version == version and trainer.control.num_failed == 1
    assert re.search(rf"v0+{version + 1}/{name} is (damaged|missing)", trainer.last_error()), trainer.last_error()
    assert trainer.serves_its_files()
    trainer.step_to(20, 21, 22, 23)  # the same number again, by other weights
    assert trainer.control.live == IndexState(version + 1, 20)
    assert trainer.serves_its_files()


def test_a_damaged_snapshot_or_quantizer_is_not_built_upon(tmp_path, data, service, versions, monkeypatch):
    trainer = trainer_of(tmp_path, data, service, version := next(versions), LOSSY)
    store = service.store
    begin = store.begin

    def damage_and_begin(plan: BuildPlan) -> Missing:
        flip(store.encoder_folder(plan.version) / "model.safetensors")
        return begin(plan)

    monkeypatch.setattr(store, "begin", damage_and_begin)
    trainer.step_to(9, 10, 13)
    monkeypatch.undo()
    expected = rf"v0*{version + 1}/encoder/model\.safetensors is damaged"
    assert re.search(expected, trainer.last_error()), trainer.last_error()
    flip(store.quantizer_path(version))
    trainer.step_to(20, 23)
    assert re.search(rf"v0*{version}/quantizer\.faiss is damaged", trainer.last_error()), trainer.last_error()
    flip(store.quantizer_path(version))
    trainer.step_to(30, 33)
    assert trainer.control.live == IndexState(version + 1, 30)
    assert trainer.serves_its_files()


WRITE_CUT_SHORT = """
import resource, signal, sys
from pathlib import Path
import numpy as np
import torch
from replug.config.errors import RunError
from replug.index_workers.faiss_index import fill, train_quantizer
from replug.index_workers.kinds import IndexKind
from replug.index_workers.version_store import VersionStore  # noqa: E402

store, vectors = VersionStore(Path(sys.argv[1])), np.random.default_rng(0).normal(size=(1000, 33)).astype(np.float16)
kind = IndexKind("SQ8")
store.folder(0).mkdir(parents=True)
store.write_vectors(0, 0, vectors)
store.write_marked(store.quantizer_path(0), lambda out: train_quantizer(kind, vectors, out))
fill_shard = lambda out: fill(store.quantizer_path(0), [vectors], out)
store.write_marked(store.shard_path(0, 0), fill_shard)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for path, write in (
    (store.vectors_path(0, 0), lambda: store.write_vectors(0, 0, vectors)),
    (store.shard_path(0, 0), lambda: store.write_marked(store.shard_path(0, 0), fill_shard)),
):
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 50, resource.RLIM_INFINITY))
    try:
        write()
        print(path.name, "was written short:", path.stat().st_size, "of", size)
    except RunError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_disk_that_takes_all_but_the_last_bytes_is_noticed(tmp_path):
    """numpy and FAISS both close their files without looking whether that succeeded."""
    command = [sys.executable, "-c", WRITE_CUT_SHORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert re.search(r"vectors-00000\.npy\.\S*partial cannot be written", lines[0])
    assert re.search(r"shard-00000\.faiss\.\S*partial cannot be written", lines[1])


# Memory --------------------------------------------------------------------------------------------------------


DOCUMENTS, DIM, BLOCK = 60_000, 64, 4096
MEGABYTES = DOCUMENTS * DIM * 2 / 2 / 2**20  # of one shard's float16 vectors


def synthetic_version(service: IndexService, version: int, kind: IndexKind) -> BuildPlan:
    """A version whose blocks are there already, by no encoder."""
    plan = replace(
        PLAN,
        version=version,
        weights_sha256=f"{version}",
        num_documents=DOCUMENTS,
        block_documents=BLOCK,
        similarity="dot",
        dim=DIM,
        kind=kind,
        num_shards=2,
        quantizer_from=version - 1 if version else None,
    )
    service.store.folder(version).mkdir(parents=True)
    service.store.begin(plan)
    rows = np.random.default_rng(version).normal(size=(DOCUMENTS, DIM)).astype(np.float16)
    for file in range(plan.num_files):
        service.store.write_vectors(version, file, rows[plan.rows_of_file(file).start :][:BLOCK])
    return plan


def searcher_memory(service: IndexService) -> float:
    """Megabytes of the largest searcher."""
    pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=300) for actor in service.searchers]
    return max(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_session")
def test_memory_does_not_grow_with_the_number_of_swaps(tmp_path):
    kind = IndexKind("IVF16,SQ8", 4, 4)
    service = IndexService(tmp_path / "index", actors=IndexActors(num_shards=2))
    queries = np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)
    memory, threads = [], []
    try:
        for version in range(34):
            plan = synthetic_version(service, version, kind)
            service.refresh(plan, max(0, version - 1)).result(300)
            service.search(version, queries, 10)
            service.commit(version)
            service.search(version, queries, 10)
            service.store.remove_all_but({version, version - 1})
            memory.append(searcher_memory(service))
            threads.append(threading.active_count())
    finally:
        service.close()
    assert max(memory[4:]) - memory[4] < 2 * MEGABYTES
    assert threads[-1] <= threads[4]
