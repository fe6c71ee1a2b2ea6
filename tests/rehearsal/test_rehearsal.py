"""The paper's run on fake GPUs: its actors, places, refreshes and checkpoints, with stand-ins for models and texts.

Each run is interrupted half-way by SIGTERM and started again. It shows no speed, no GPU kernel and no NCCL.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from replug.cluster import gpus
from replug.cluster.interruption import EXIT_STATUS
from replug.cluster.layout import Layout, lay_out
from replug.cluster.packing import BUILDER, SCORER, SEARCHER, TRAINER, Actor, Node
from replug.config.load import load_config
from replug.config.refresh_policy import refresh_policy
from replug.planning.memory import most_versions, run_sizes
from tests.support.command_line import ROOT
from tests.support.fake_cluster import FakeActor, FakeCluster, fake_cluster

PAPER, DEBUG = str(ROOT / "configs/paper.yaml"), str(ROOT / "configs/debug.yaml")
SECONDS = 1800
A100_GB = 80.0
CLASSES = {TRAINER: "TrainerRank", SEARCHER: "Searcher", BUILDER: "Builder", SCORER: "Scorer"}
MOST_SCORERS = 8  # they are alike, and each takes 200 MB and seconds of a core to start
# Of the paper: batches, and two steps between checkpoints where it has 500, in the same ratios. Four refreshes.
PAPERS = (
    *("train.max_steps=50", "refresh.every_steps=12", "refresh.lag_steps=4", "checkpoint.every_steps=2"),
    *("train.batch_size=64", "train.micro_batches=2", "train.pipeline_depth=2", "retrieve.k=20"),
)
# Of the stand-ins: few short texts in many files.
SMALL = (*("data.num_queries=1600", "data.num_heldout=8", "index.block_documents=16", "evaluate.max_examples=4"),)


def papers_layout(nodes: int, gpus_of_node: int, resources: Sequence[str]) -> Layout:
    """Lay the real run out on A100s of known memory."""
    config = load_config(PAPER, resources)
    machines = [Node(f"node {n}", 64, gpus_of_node, 1e9 * A100_GB, is_driver=n == 0) for n in range(nodes)]
    return lay_out(config, machines, run_sizes(config, config.data.num_documents, has_bfloat16=True))


def keys_of(layout: Layout) -> list[str]:
    """The layout as keys, so that stand-ins, which are small, get the same places."""
    config = layout.config
    found = {f"resources.{role}": getattr(config.resources, role) for role in ("train", "score", "index")}
    if layout.is_shared:
        return [f"{key}={value:g}" for key, value in found.items()]
    found["lm.num_replicas"] = min(MOST_SCORERS, config.lm.num_replicas or 1)
    found["lm.gpus_per_replica"] = config.lm.gpus_per_replica
    for key in ("num_shards", "num_builders", "gpus_per_builder", "gpus_per_searcher"):
        found[f"index.{key}"] = getattr(config.index, key)
    return [f"{key}={value}" for key, value in found.items() if value != "auto"]


class RehearsedRun:
    """`replug train` in processes of its own, and the most actors that were up at once."""

    def __init__(self, cluster: FakeCluster, run_dir: Path, keys: Sequence[str]) -> None:
        given = [*PAPERS, *SMALL, *keys, f"run_dir={run_dir}", f"ray.address={cluster.address}"]
        self.command = [sys.executable, "-m", "replug.commands.cli", "train", DEBUG, *given]
        self.config = load_config(DEBUG, given)
        self.actors: list[FakeActor] = []
        self.most_versions = 0
        self._cluster, self._run_dir, self._output = cluster, run_dir, run_dir.parent / "output.txt"

    def start(self, interrupt_at: int | None = None) -> int:
        """Run to the end, or to so many steps and then SIGTERM. Returns the exit status."""
        with self._output.open("ab") as output:
            process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
            )
        deadline = time.monotonic() + SECONDS
        try:
            while process.poll() is None and time.monotonic() < deadline:
                up = [actor for actor in self._cluster.actors() if actor.is_up]
                self.actors = max(self.actors, up, key=len)
                self.most_versions = max(self.most_versions, len(list((self._run_dir / "index").glob("v*"))))
                if interrupt_at is not None and len(self.metrics()) >= interrupt_at:
                    process.send_signal(signal.SIGTERM)
                    interrupt_at = None
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def metrics(self) -> list[dict[str, float]]:
        file = self._run_dir / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def output(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]


def planned_roles(layout: Layout, num_scorers: int) -> "Counter[tuple[str, ...]]":
    """How many GPUs have which actors; rank 0 is no actor, and the last scorers may be left out."""

    def is_there(actor: Actor) -> bool:
        return actor.number < num_scorers if actor.key == SCORER else (actor.key, actor.number) != (TRAINER, 0)

    there = (tuple(sorted(CLASSES[one.key] for one in gpu.actors if is_there(one))) for gpu in layout.gpus)
    return Counter(roles for roles in there if roles)


def found_roles(actors: Sequence[FakeActor]) -> "Counter[tuple[str, ...]]":
    by_gpu: dict[tuple[str, int], list[str]] = {}
    for actor in actors:
        for gpu in actor.gpus:
            by_gpu.setdefault((actor.node, gpu), []).append(actor.role)
    return Counter(tuple(sorted(roles)) for roles in by_gpu.values())


LAYOUTS = {
    "8xA100": (1, 8, []),
    "2x4xA100": (2, 4, []),
    "64xA100": (8, 8, []),
    # As few processes as there can be with a scorer on each GPU: 24 take many minutes of two cores.
    "shared": (1, 8, ["resources.train=1", "resources.score=8", "resources.index=2"]),
}


@pytest.mark.nightly
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_papers_run_is_laid_out_interrupted_resumed_and_ends(name: str, tmp_path: Path) -> None:
    nodes, gpus_of_node, resources = LAYOUTS[name]
    layout = papers_layout(nodes, gpus_of_node, resources)
    assert layout.num_waiting == 0
    with fake_cluster(nodes, gpus_of_node, A100_GB) as cluster:
        run = RehearsedRun(cluster, tmp_path / "run", keys_of(layout))
        train, kept = run.config.train, run.config.checkpoint
        assert run.start(interrupt_at=train.max_steps // 2) == EXIT_STATUS, run.output()
        assert run.start() == 0, run.output()
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(train.max_steps))
    assert found_roles(run.actors) == planned_roles(layout, run.config.lm.num_replicas or len(layout.actors))
    policy = refresh_policy(run.config.refresh, train.max_steps)
    assert rows[-1]["index/live_version"] == policy.num_starts
    # A checkpoint's seconds are in the row after its step: the last has none, nor one that the interruption follows.
    assert sum(row["time/checkpoint_seconds"] > 0 for row in rows) >= train.max_steps // kept.every_steps - 2
    assert run.most_versions <= most_versions(run.config) + 1  # one that is being removed


# The variable that makes GPUs numbers --------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> gpus.Rehearsal:
    rehearsal = gpus.Rehearsal(8, A100_GB)
    for name, value in rehearsal.environment().items():
        monkeypatch.setenv(name, value)
    return rehearsal


def test_in_a_rehearsal_gpus_are_counted_and_nothing_computes_on_them(pretend: gpus.Rehearsal) -> None:
    from replug.models.hardware import default_device

    assert (gpus.rehearsal(), gpus.num_gpus()) == (pretend, 8)
    assert gpus.torch_device(wants_gpu=True) == default_device().type == "cpu"


def test_outside_of_one_a_share_of_a_gpu_means_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    assert (gpus.torch_device(wants_gpu=True), gpus.torch_device(wants_gpu=False)) == ("cuda", "cpu")
