"""Embedders, searchers and whole nodes killed at random, with kill -9, in a training run on a cluster of three nodes:
the run ends, every number is the quiet run's, and nothing is left behind. Many swaps take no more memory than few.

REPLUG_STORM=full runs it at full size: 50 kills, three of them whole nodes, some ten minutes.
"""

import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from replug.config.schema import IndexConfig
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.kinds import IndexKind
from replug.index_workers.service import IndexService
from tests.support.command_line import STEPS, start
from tests.support.ray_nodes import ACTORS, RayCluster
from tests.support.runs import metrics, what_must_be_equal

pytestmark = pytest.mark.nightly

FULL = os.environ.get("REPLUG_STORM") == "full"
KILLS, NODES_AT = (50, (9, 24, 39)) if FULL else (8, (4,))
MAX_STEPS = 90 if FULL else STEPS
OVERRIDES = [
    f"train.max_steps={MAX_STEPS}",
    "lm.path=stand_in:0.7",  # sleeps so long in each call: steps that last, at no cost
    "lm.max_attempts=100",
    "index.num_shards=2",
    "index.num_builders=2",
    "index.max_attempts=100",
]


class Killer(threading.Thread):
    """Kills embedders, searchers and nodes at random times until it has killed enough, or is told to stop."""

    def __init__(self, cluster: RayCluster, index: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._index = cluster, index
        self._random, self.stop = random.Random(seed), threading.Event()
        self.killed: Counter[str] = Counter()
        self.while_building = 0
        self.seen: dict[str, set[int]] = {kind: set() for kind in ACTORS}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.killed.total() < KILLS and not self.stop.wait(self._random.uniform(0.3, 3.0)):
                self._kill_one()
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _kill_one(self) -> None:
        if self.killed.total() in NODES_AT:
            self._cluster.kill_node(self._random.randrange(2))
            self.killed["node"] += 1
            self.stop.wait(self._random.uniform(0.0, 2.0))
            return self._cluster.add_node()
        kind = self._random.choice(["Builder", "Builder", "Searcher"])
        found = {each: self._cluster.actors(each) for each in ACTORS}
        for each, processes in found.items():
            self.seen[each] |= {process.pid for process in processes}
        if not found[kind]:
            return None
        if kind == "Builder" and self._random.random() < 0.7:
            self._await_build()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.while_building += kind == "Builder" and self._is_building()
            self._random.choice(found[kind]).kill()
            self.killed[kind] += 1
        return None

    def _await_build(self) -> None:
        """Embedding takes a second of every ten here: most kills of embedders are to hit it."""
        end = time.monotonic() + 6
        while not self._is_building() and time.monotonic() < end and not self.stop.wait(0.01):
            pass
        self.stop.wait(self._random.uniform(0.0, 0.3))

    def _is_building(self) -> bool:
        return any(not (plan.parent / "manifest.json").exists() for plan in self._index.glob("v*/inputs.json"))


def run_on(cluster: RayCluster, run: Path, killer: Killer | None = None) -> tuple[str, float]:
    """What a run that joins the cluster prints, and its seconds from the first step to the end."""
    process = start(run, *OVERRIDES, f"ray.address={cluster.address}")
    try:
        while process.poll() is None and not (run / "index/v000000/inputs.json").exists():
            time.sleep(0.05)
        begun = time.monotonic()
        if killer:
            killer.start()
        output, _ = process.communicate(timeout=1500 if FULL else 500)
    finally:
        if killer:
            killer.stop.set()
        process.kill()
    assert process.returncode == 0, output
    return output, time.monotonic() - begun


def left_behind(cluster: RayCluster) -> list[int]:
    """Processes of actors that are alive some seconds after the run ended."""
    end = time.monotonic() + 10
    while (left := [p.pid for kind in ACTORS for p in cluster.actors(kind)]) and time.monotonic() < end:
        time.sleep(0.2)
    return left


@pytest.mark.timeout(2400 if FULL else 600)
def test_a_storm_over_embedders_searchers_and_nodes_changes_no_number(request, tmp_path):
    run = tmp_path / "run"
    with RayCluster() as cluster:
        quiet, compared = tmp_path / "quiet", ""
        if FULL:
            _, quiet_seconds = run_on(cluster, quiet)
        else:
            quiet = request.getfixturevalue("quiet_run")
        killer = Killer(cluster, run / "index", seed=1)
        output, seconds = run_on(cluster, run, killer)
        killer.join(30)
        actors_left = left_behind(cluster)
        processes_left = cluster.close()
    respawns = Counter(re.findall(r"(index builder|scorer) \d+ died", output))
    if FULL:
        compared = f", quiet {quiet_seconds:.1f} s ({seconds / quiet_seconds:.2f}x)"
    print(
        f"\n{killer.killed.total()} kills {dict(killer.killed)}, {killer.while_building} of them in a build; "
        f"respawned: {dict(respawns)}; processes seen: { {kind: len(pids) for kind, pids in killer.seen.items()} }; "
        f"storm {seconds:.1f} s{compared}"
    )
    assert killer.error is None
    assert killer.killed.total() == KILLS, "the run ended before the storm did"
    assert set(killer.killed) == {"Builder", "Searcher", "node"}
    assert what_must_be_equal(run) == what_must_be_equal(quiet)
    assert (run / "results.json").read_text() == (quiet / "results.json").read_text()
    assert [row["index/refreshes_failed"] for row in metrics(run)] == [0.0] * MAX_STEPS
    assert nothing_unneeded(run) == []
    assert actors_left == []
    assert processes_left == []


def nothing_unneeded(run: Path) -> list[str]:
    """Half-written files, checkpoints, and versions but the last two."""
    versions = sorted(path.name for path in (run / "index").glob("v*"))
    partial = [str(path) for path in run.rglob("*.partial*")]
    return [*partial, *versions[:-2], *map(str, run.glob("checkpoints/*"))]


DOCUMENTS, DIM, BLOCK = 60_000, 64, 4096
MEGABYTES = DOCUMENTS * DIM * 2 / 2 / 2**20  # of one shard's float16 vectors


def synthetic_version(service: IndexService, version: int, kind: IndexKind) -> BuildPlan:
    """A version whose blocks are there already, by no encoder."""
    plan = BuildPlan(
        version=version,
        step=version,
        weights_sha256=f"{version}",
        corpus_path="none",
        corpus_sha256="none",
        num_documents=DOCUMENTS,
        block_documents=BLOCK,
        similarity="dot",
        max_tokens=8,
        dim=DIM,
        dtype="float32",
        tokens_per_batch=8,
        kind=kind,
        num_shards=1 if kind.is_exact else 2,
        quantizer_from=None if kind.is_exact or not version else version - 1,
    )
    service.store.folder(version).mkdir(parents=True)
    service.store.begin(plan)
    rows = np.random.default_rng(version).normal(size=(DOCUMENTS, DIM)).astype(np.float16)
    for file in range(plan.num_files):
        service.store.write_vectors(version, file, rows[plan.rows_of_file(file).start :][:BLOCK])
    return plan


def searcher_memory(service: IndexService) -> tuple[float, set[str]]:
    """Megabytes of the largest searcher, and the version folders that any of them still has files of mapped."""
    pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=300) for actor in service.searchers]
    mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    folders = {match for text in mapped for match in re.findall(r"/(v\d{6})/", text)}
    return max(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20, folders


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("kind", [IndexKind(), IndexKind("IVF16,SQ8", 4, True, 4)], ids=["flat_fp16", "ivf_sq8"])
def test_memory_does_not_grow_with_the_number_of_swaps(tmp_path, kind):
    service = IndexService(tmp_path / "index", IndexConfig(num_shards=2, num_builders=1))
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
            megabytes, folders = searcher_memory(service)
            assert folders == {f"v{version:06d}"}
            memory.append(megabytes)
            threads.append(threading.active_count())
    finally:
        service.close()
    print(f"\n{kind.factory or 'flat_fp16'}: searcher MB after each swap: {[round(m) for m in memory]}")
    assert max(memory[4:]) - memory[4] < 2 * MEGABYTES
    assert threads[-1] <= threads[4]
