"""Refreshes that fail, on a real service with real Ray: the file is named, the live index goes on serving, and the
next refresh is as if nothing had been.
"""

import itertools
import os
import re
import resource
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
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.faiss_index import fill, train_quantizer
from replug.index_workers.kinds import IndexKind
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import Missing, VersionStore
from replug.models.build import load_encoder
from replug.train.refresh import RefreshController
from replug.train.sources import LiveBatches
from replug.train.step_metrics import StepClock
from tests.support.command_line import ROOT
from tests.support.index_versions import PLAN, flip, written_before
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.slow

FLAT, LOSSY = "flat_fp16", "IVF8,SQ8"


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


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(0, 10)


class Trainer:
    """The trainer at its step boundaries, with every wait bounded: refreshes start at 10, 20, ... with a lag of 3."""

    def __init__(self, folder: Path, data: PreparedSet, service: IndexService, version: int, kind: str = FLAT) -> None:
        keys = ["refresh.every_steps=10", "refresh.lag_steps=3", "train.max_steps=99", "index.num_shards=2"]
        overrides = [f"run_dir={folder / 'run'}", f"index.kind={kind}", *keys]
        self.config = load_config(ROOT / "configs/debug.yaml", overrides)
        self.data, self.service = data, service
        self.encoder = load_encoder(self.config.retriever)
        plan = publish_snapshot(self.config, self.encoder, data, service.store, IndexState(version, 0))
        service.build(plan).result(300)
        service.prepare(version)
        self.control = self.new_control()
        self.control.live = IndexState(version, 0)
        service.commit(version)

    def new_control(self) -> RefreshController:
        workers = SimpleNamespace(index=self.service, lm=SimpleNamespace(submit_examples=print), template=None)
        parts = (self.config, self.data, self.encoder, workers, None, StepClock(), lambda: None)
        return LiveBatches(*parts)._refresh

    def step_to(self, *steps: int) -> None:
        """A boundary, then what training does to the weights."""
        for step in steps:
            self.control.at_boundary(step)
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for weight in self.encoder.parameters():
                    weight.add_(0.1 * torch.randn(weight.shape, generator=generator))

    def require_served(self, version: int, step: int) -> None:
        """The searchers answer from the live version's files, read here."""
        assert self.control.live == IndexState(version, step)
        queries, store = self.encoder.encode(["some words of a query", "others"]).numpy(), self.service.store
        store.remove_all_but({version})
        answer = self.service.search(version, queries, 8)
        rows, similarities = LocalIndex(store.root, 1).search(queries, 8)
        assert np.array_equal(answer.doc_rows, rows) and np.array_equal(answer.similarities, similarities)

    def require_failed(self, version: int, times: int, cause: str) -> None:
        assert self.control.live.version == version and self.control.num_failed == times
        assert re.search(cause, error := str(self.control._last_error)), error


FULL_AT = [
    (LOSSY, "shard-00001.faiss", r"shard-0000[01]\.faiss\.\S*partial cannot be written: "),
    (FLAT, "vectors-00000.npy", r"vectors-000\d\d\.\S*partial cannot be written: "),
]


@pytest.mark.root
@pytest.mark.parametrize(("kind", "name", "named"), FULL_AT)
def test_a_disk_that_is_full_leaves_the_live_index_serving_until_it_is_too_old(
    tmp_path, data, ray_session, kind, name, named, monkeypatch
):
    monkeypatch.setattr(refresh_policy, "INTERVALS_TO_STOP", 1.5)
    # A service of its own: actors give the space of removed files back when they please.
    with small_disk(tmp_path / "disk", megabytes=8) as disk, service_in(disk.folder) as service:
        trainer = Trainer(tmp_path, data, service, 0, kind)
        disk.leave(written_before(service.store, service.store.plan(0), name))
        trainer.step_to(9, 10, 11, 12, 13)
        trainer.require_failed(0, 1, named)
        assert [str(path) for path in disk.folder.rglob("*.partial*")] == []
        trainer.step_to(14, 15)
        with pytest.raises(RunError, match=rf"step 16: index v0 is 16 steps old.*{named}"):
            trainer.control.at_boundary(16)
        disk.free()
        state, trainer.control = trainer.control.state(), trainer.new_control()  # as the same command does
        trainer.control.restore(state)
        trainer.step_to(16)
        trainer.require_served(1, 16)
        trainer.step_to(17, 20, 21, 23)
        trainer.require_served(2, 20)


@pytest.mark.parametrize(
    ("kind", "name", "damage", "at"),
    [
        (FLAT, "vectors-00001.npy", Path.unlink, "publish"),  # of the second shard: the first one loads its own
        (LOSSY, "shard-00001.faiss", flip, "publish"),
        (LOSSY, "encoder/model.safetensors", flip, "begin"),  # the snapshot
    ],
)
def test_damage_is_named_and_never_built_upon_or_served(
    tmp_path, data, service, versions, monkeypatch, kind, name, damage, at
):
    trainer = Trainer(tmp_path, data, service, version := next(versions), kind)
    service.store.remove_all_but({version})
    whole = getattr(service.store, at)

    def damaged(plan: BuildPlan) -> Missing | None:
        path = service.store.folder(plan.version) / name
        if at == "begin":
            damage(path)
            return whole(plan)
        whole(plan)
        damage(path)
        return None

    with monkeypatch.context() as patched:
        patched.setattr(service.store, at, damaged)
        trainer.step_to(9, 10, 11, 12, 13)  # other weights than those of the live version
    trainer.require_failed(version, 1, rf"v0*{version + 1}/{name} is (damaged|missing)")
    trainer.require_served(version, 0)
    trainer.step_to(20, 21, 22, 23)  # the same number again, by other weights
    trainer.require_served(version + 1, 20)


def test_a_disk_that_takes_all_but_the_last_bytes_is_noticed(tmp_path):
    """numpy and FAISS both close their files without looking whether that succeeded."""
    store, vectors = VersionStore(tmp_path), np.random.default_rng(0).normal(size=(1000, 33)).astype(np.float16)
    quantizer, shard = store.quantizer_path(0), store.shard_path(0, 0)
    store.folder(0).mkdir(parents=True)
    store.write_marked(quantizer, lambda out: train_quantizer(IndexKind("SQ8"), vectors, out))
    for path, write in (
        (store.vectors_path(0, 0), lambda: store.write_vectors(0, 0, vectors)),
        (shard, lambda: store.write_marked(shard, lambda out: fill(quantizer, [vectors], out))),
    ):
        write()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - 50, hard))  # Python ignores its signal
        try:
            with pytest.raises(RunError, match=rf"{path.name}\.\S*partial cannot be written"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_session")
def test_memory_does_not_grow_with_the_number_of_swaps(tmp_path):
    documents, dim, block, megabytes = 60_000, 64, 4096, []
    kind = {"kind": IndexKind("IVF16,SQ8", 4, 4), "similarity": "dot", "num_shards": 2}
    shape = {"num_documents": documents, "dim": dim, "block_documents": block}
    service = IndexService(tmp_path / "index", actors=IndexActors(num_shards=2))
    queries = np.random.default_rng(0).normal(size=(16, dim)).astype(np.float32)
    try:
        for version in range(34):  # their blocks are there already, by no encoder
            plan = replace(PLAN, **kind, **shape, version=version, weights_sha256=f"{version}")
            service.store.folder(version).mkdir(parents=True)
            service.store.begin(plan)
            rows = np.random.default_rng(version).normal(size=(documents, dim)).astype(np.float16)
            for file in range(plan.num_files):
                service.store.write_vectors(version, file, rows[plan.rows_of_file(file).start :][:block])
            service.refresh(plan, max(0, version - 1)).result(300)
            service.commit(version)
            service.search(version, queries, 10)
            service.store.remove_all_but({version, version - 1})
            pids = [
                ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=300)
                for actor in service.searchers.actors
            ]
            megabytes.append(max(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20)
    finally:
        service.close()
    of_a_shard = documents * dim * 2 / 2 / 2**20  # float16 vectors
    assert max(megabytes[4:]) - megabytes[4] < 2 * of_a_shard
