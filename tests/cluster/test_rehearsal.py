"""A run that is rehearsed: what of it is real, what is small, and what is said not to fit."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replug.cluster import gpus
from replug.cluster.gpu_shares import Sizes
from replug.cluster.layout import Layout, lay_out
from replug.cluster.packing import Node
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.rehearsal import command as rehearsing
from replug.rehearsal.fake_cluster import FakeActor
from replug.rehearsal.findings import Needed, Room, findings
from replug.rehearsal.processes import Held, Limits
from replug.rehearsal.report import misfits
from replug.rehearsal.run import Rehearsed
from replug.rehearsal.scaling import (
    CorpusFiles,
    Counts,
    Places,
    corpus_files,
    counts_of,
    num_texts,
    scaled_config,
    scaled_files,
    scaled_schedule,
)
from replug.rehearsal.watching import Most, Watch
from tests.support.command_line import ROOT

PLACES = Places(Path("/r/run"), Path("/r/prepared"), Path("/r/retriever"), "127.0.0.2:1")
PAPER = ROOT / "configs/paper.yaml"


def configured(*overrides: str, path: Path = PAPER) -> Config:
    return load_config(path, overrides)


# What is real -------------------------------------------------------------------------------------------


def test_the_papers_steps_shrink_to_two_for_each_checkpoint_and_every_ratio_stays() -> None:
    scaled = scaled_schedule(configured())
    steps = (
        scaled.train.max_steps,
        scaled.refresh.every_steps,
        scaled.refresh.lag_steps,
        scaled.checkpoint.every_steps,
    )
    assert steps == (100, 12, 4, 2)
    assert counts_of(scaled) == counts_of(configured()) == Counts(refreshes=7, checkpoints=50, most_versions=3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.max_steps=977", "refresh.every_steps=101", "refresh.lag_steps=37", "checkpoint.every_steps=89"],
        ["train.max_steps=300", "refresh.every_steps=7", "refresh.lag_steps=7", "checkpoint.every_steps=100"],
        ["refresh.mode=sync", "refresh.lag_steps=null"],
        ["refresh.adopt=when_ready", "refresh.lag_steps=null", "refresh.max_age_steps=20000"],
        ["train.max_steps=40", "checkpoint.every_steps=1", "refresh.every_steps=10", "refresh.lag_steps=3"],
        ["train.max_steps=100", "refresh.every_steps=3000", "checkpoint.every_steps=500"],
    ],
)
def test_refreshes_checkpoints_and_versions_are_as_many_as_in_the_run(overrides: list[str]) -> None:
    config = configured(*overrides)
    scaled = scaled_schedule(config)
    assert counts_of(scaled) == counts_of(config)
    assert scaled.train.max_steps <= config.train.max_steps


def test_a_large_corpus_has_as_many_files_as_a_small_one_can_have() -> None:
    files = corpus_files(configured(), 36_000_000)
    assert files == CorpusFiles(36_000_000, shards=2198, vector_files=550, block=1024)
    assert scaled_files(files, k=20) == CorpusFiles(512 * 9, shards=2198, vector_files=512, block=9)


def test_a_small_corpus_has_all_its_files() -> None:
    files = corpus_files(configured(path=ROOT / "configs/debug.yaml"), 500)
    assert (files.shards, files.vector_files) == (1, 4)
    small = scaled_files(files, k=8)
    config = replace(configured().index, block_documents=small.block)
    scaled = corpus_files(replace(configured(), index=config), small.documents)
    assert scaled.vector_files == files.vector_files
    assert small.documents >= 2 * 8


def test_actors_batches_and_documents_are_the_runs_and_models_are_not() -> None:
    config = configured("lm.num_replicas=6", "lm.gpus_per_replica=1", "index.num_builders=2", "resources.train=4")
    scaled = scaled_config(config, CorpusFiles(4608, 2198, 512, 9), PLACES)
    assert (scaled.lm.num_replicas, scaled.lm.gpus_per_replica, scaled.lm.path) == (6, 1, "stand_in")
    assert (scaled.index.num_builders, scaled.index.block_documents, scaled.index.kind) == (2, 9, "flat_fp16")
    assert (scaled.train.batch_size, scaled.retrieve.k, scaled.resources.train) == (64, 20, 4)
    assert (scaled.data.prepared, scaled.ray.address, scaled.run_dir) == ("/r/prepared", "127.0.0.2:1", "/r/run")


def test_as_many_epochs_are_trained() -> None:
    config = configured()
    assert num_texts(config, scaled_schedule(config)) == (3200, 200)  # 100 steps of 64 are two epochs, as in the run


def test_an_lm_on_a_server_is_one_actor_and_a_string_for_faiss_the_preset_that_is_like_it() -> None:
    server = ["lm.path=null", "lm.url=http://127.0.0.1:1/v1", "lm.model=m", "resources.score=auto"]
    scaled = scaled_config(configured(*server, "index.kind='IVF4096,PQ96x4fs'"), CorpusFiles(36, 1, 4, 9), PLACES)
    assert (scaled.lm.path, scaled.lm.url, scaled.lm.num_replicas) == ("stand_in", None, configured().lm.num_replicas)
    assert scaled.index.kind == "ivf_sq8"


# What does not fit --------------------------------------------------------------------------------------


ROOMY = Room(disk_gb=1e6, host_gb=1e6)
NEEDED = Needed(disk_gb=500.0, host_gb=0.0, hours=20.0)
OVERRIDES = ["resources.train=1", "resources.index=1", "resources.score=2", "train.max_steps=400"]
STEPS = ["checkpoint.every_steps=100", "refresh.every_steps=200", "refresh.lag_steps=50"]


@pytest.fixture(scope="module")
def layout() -> Layout:
    node = Node("a", 64, 4, 80e9, is_driver=True)
    return lay_out(configured(*OVERRIDES, *STEPS), [node], Sizes(1e9, 1e9, 1e9, lambda ranks: 1e9 + 1e9 / ranks))


def held(other: int, index: int = 0) -> Held:
    return Held(Counter(other=other, index=index), Counter(other=other, index=index), 10**8)


def went_well(layout: Layout, **changes: Any) -> Rehearsed:
    """What is seen of a rehearsal in which all goes as planned, but for the changes of what was watched."""
    pairs = [("Builder", 1), ("Searcher", 1), ("Scorer", 2), ("Scorer", 3)]
    actors = [FakeActor("1", role, "127.0.0.2", 7, (gpu,), is_up=True, was_up=True) for role, gpu in pairs]
    most = {"rank 0": Most(held(50), held(1700), 10**8, Limits(1024, 65530))}
    seen = {"fullest": actors, "ended": actors, "most": most, "most_versions": 2, **changes}
    watch = Watch(None, Path("/corpus"), Path("/index"), **seen)  # type: ignore[arg-type]
    scaled = scaled_schedule(layout.config)
    steps = [
        {
            "step": step,
            "time/refresh_seconds": 0.1 if step and step % scaled.refresh.every_steps == 0 else 0.0,
            "time/checkpoint_seconds": 0.2 if (step + 1) % scaled.checkpoint.every_steps == 0 else 0.0,
            "index/live_version": 1,
        }
        for step in range(scaled.train.max_steps)
    ]
    files = CorpusFiles(36_000_000, 2198, 5500, 1024)
    return Rehearsed(files, scaled_files(files, 20), scaled, watch, [75, 0], steps, "", 1.0)


def found(layout: Layout, rehearsed: Rehearsed, needed: Needed = NEEDED, room: Room = ROOMY) -> list[str]:
    return misfits(findings(layout, rehearsed, needed, room))


def test_of_a_run_that_goes_as_planned_all_fits(layout: Layout) -> None:
    assert found(layout, went_well(layout)) == []


def test_a_machine_that_cannot_hold_the_processes_is_told_before_they_start(layout: Layout, monkeypatch) -> None:
    monkeypatch.setattr(rehearsing, "available_memory", lambda: 10**12)
    rehearsing.check_memory(layout)
    monkeypatch.setattr(rehearsing, "available_memory", lambda: 10**9)
    with pytest.raises(UserError, match=r"starts 5 processes on this machine, which take about 2 GB, and 1 GB are"):
        rehearsing.check_memory(layout)


def test_a_disk_and_a_nodes_memory_that_are_too_small_are_named(layout: Layout) -> None:
    lines = found(layout, went_well(layout), Needed(500.0, 111.0, 20.0), Room(disk_gb=60.0, host_gb=24.0))
    assert "memory of a node for searches: 111.0 GB, there is 24.0 GB; change: more nodes" in lines[0]
    assert "disk under run_dir: 500 GB, there is 60 GB free; change: run_dir on a larger disk" in lines[1]


def test_files_of_the_index_are_counted_up_to_those_of_the_run(layout: Layout) -> None:
    most = {"Searcher": Most(held(60, index=100), held(700), 10**8, Limits(1024, 65530))}
    (line,) = found(layout, went_well(layout, most=most))
    assert "open files of Searcher: 1,134, there is 1,024; change: ulimit -n" in line  # 60 + 100 x 5,500 / 512


def test_an_actor_that_never_came_up_and_one_on_another_gpu_are_named(layout: Layout) -> None:
    well = went_well(layout).watch
    waiting = [*well.ended, FakeActor("1", "Builder", "", 0, (), is_up=False, was_up=False)]
    (line,) = found(layout, went_well(layout, ended=waiting))
    assert "actors that found no place: 1 Builder" in line
    moved = [replace(actor, gpus=(2,)) if actor.role == "Builder" else actor for actor in well.fullest]
    (line,) = found(layout, went_well(layout, fullest=moved))
    assert "GPUs with the actors that are planned" in line and "Builder + Scorer; Searcher" in line


def test_what_an_earlier_start_left_waiting_when_it_was_interrupted_does_not_count(layout: Layout) -> None:
    interrupted = FakeActor("0", "Scorer", "", 0, (), is_up=False, was_up=False)
    ended = [interrupted, *went_well(layout).watch.ended]
    assert found(layout, went_well(layout, ended=ended)) == []


def test_a_run_that_ends_by_an_error_is_named_with_its_last_line(layout: Layout) -> None:
    failed = replace(went_well(layout), statuses=[1], output="training ...\nreplug: no space left\n")
    (line,) = [one for one in found(layout, failed) if "the run" in one]
    assert "exit status 1" in line and "replug: no space left" in line


def test_refreshes_and_checkpoints_that_did_not_happen_are_missed(layout: Layout) -> None:
    well = went_well(layout)
    none = [{**row, "index/live_version": 0, "time/checkpoint_seconds": 0.0} for row in well.metrics]
    lines = found(layout, replace(well, metrics=none))
    assert [line.split(":")[1] for line in lines] == [" index refreshes", " checkpoints"]


def test_a_rank_0_that_is_busy_with_checkpoints_for_too_long_is_named(layout: Layout) -> None:
    well = went_well(layout)
    slow = [{**row, "time/checkpoint_seconds": 300.0 * (row["time/checkpoint_seconds"] > 0)} for row in well.metrics]
    (line,) = found(layout, replace(well, metrics=slow))
    assert "rank 0 is busy with checkpoints: 1200.0 s, there is 720 s; change: a larger checkpoint.every_steps" in line


def test_a_step_that_waits_for_starved_workers_is_not_a_busy_rank_0(layout: Layout) -> None:
    well = went_well(layout)
    assert found(layout, replace(well, metrics=[{**row, "time/train_seconds": 900.0} for row in well.metrics])) == []


# The seam -----------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> gpus.Rehearsal:
    rehearsal = gpus.Rehearsal("127.0.0.2:6379", 8, 80.0)
    for name, value in rehearsal.environment().items():
        monkeypatch.setenv(name, value)
    return rehearsal


def test_in_a_rehearsal_gpus_are_counted_and_nothing_computes_on_them(pretend: gpus.Rehearsal) -> None:
    from replug.models.hardware import default_device

    assert gpus.rehearsal() == pretend
    assert gpus.num_gpus() == 8
    assert gpus.torch_device(wants_gpu=True) == "cpu"
    assert default_device().type == "cpu"


def test_outside_of_one_a_share_of_a_gpu_means_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    assert gpus.torch_device(wants_gpu=True) == "cuda"
    assert gpus.torch_device(wants_gpu=False) == "cpu"
    gpus.check_rehearsal("10.0.0.1:6379")


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_variable_that_was_left_on_ends_every_other_run(address: str | None, pretend: gpus.Rehearsal) -> None:
    with pytest.raises(UserError, match=r"REPLUG_REHEARSAL is set.* unset REPLUG_REHEARSAL"):
        gpus.check_rehearsal(address)
    gpus.check_rehearsal(pretend.address)


def test_a_run_refuses_to_start_where_the_variable_was_left_on(pretend: gpus.Rehearsal, debug_config: Config) -> None:
    from replug.cluster.ray_cluster import ray_cluster

    with pytest.raises(UserError, match="REPLUG_REHEARSAL is set"), ray_cluster(debug_config):
        pass


# Whole rehearsals ---------------------------------------------------------------------------------------


def rehearse(*options: str) -> str:
    """What the command prints; raises CalledProcessError where something does not fit."""
    command = [sys.executable, "-m", "replug.commands.cli", "plan", *options, "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ROOM = ["--disk", "5000", "--host-memory", "1000"]
# Without what the tests tell the Ray of their own.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@pytest.mark.nightly
def test_a_small_run_is_rehearsed() -> None:
    said = rehearse("configs/debug.yaml", "data.num_documents=500", "--gpus", "2xA100", *ROOM)
    assert "resumed and ended" in said


@pytest.mark.nightly
@pytest.mark.parametrize(("gpus", "nodes"), [("8xA100", "1"), ("8xH100", "2")], ids=["8xA100", "2x4xH100"])
def test_the_papers_run_is_rehearsed_and_fits(gpus: str, nodes: str) -> None:
    said = rehearse(str(PAPER), "--gpus", gpus, "--nodes", nodes, *ROOM)
    assert "resumed and ended" in said


@pytest.mark.nightly
def test_the_papers_run_is_rehearsed_on_64_gpus_with_fewer_steps() -> None:
    """Places, ranks and resume of all actors; the number of refreshes is the other rehearsals'."""
    said = rehearse(str(PAPER), "train.max_steps=4500", "--gpus", "64xA100", "--split", "48/8/8", *ROOM)
    assert "resumed and ended" in said


@pytest.mark.nightly
def test_the_papers_run_is_rehearsed_on_eight_gpus_that_roles_share() -> None:
    """As few processes as there can be with a scorer on each GPU: 24 take many minutes of two cores."""
    said = rehearse(str(PAPER), "train.max_steps=4500", "--gpus", "8xA100", "--split", "8/2/1", *ROOM)
    assert "resumed and ended" in said
