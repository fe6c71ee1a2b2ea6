"""Several trainer ranks, joined by gloo: the losses of one rank, what the death of one does, and their trackers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from replug.config.errors import RunError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.train.fitting import (
    COLLECTIVE_PATIENCE,
    RankEnvironment,
    lightning_trainer,
    open_store,
    other_ranks,
)
from replug.train.module import share_of
from replug.train.pipeline import BatchPipeline
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT, arguments, clean_environment, start, wait_for
from tests.support.runs import descendants, metrics, name_of, wait_for_step, what_must_be_equal

TWO = "resources.train=2"
ONE_IN_TWO_PARTS = "train.micro_batches=2"  # what one rank adds up as two do


@pytest.mark.slow
def test_two_ranks_are_one_rank_in_two_parts_to_the_last_bit(two_ranks, here, tmp_path):
    here.finish(tmp_path / "run", ONE_IN_TWO_PARTS)
    assert what_must_be_equal(tmp_path / "run") == what_must_be_equal(two_ranks)
    assert (tmp_path / "run/results.json").read_text() == (two_ranks / "results.json").read_text()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_number_and_the_same_command_goes_on(two_ranks):
    """To the losses of a run that nothing disturbed: the test before this one compares them."""
    status, *lines = two_ranks.with_suffix(".killed").read_text().splitlines()
    assert status == "1"
    own = [line for line in lines if line.strip() and "wandb" not in line]  # W&B says last where its files are
    assert own[-1].startswith("replug: trainer rank 1 died: "), lines
    # The checkpoint of step 8 was there when it was killed; on a slow machine a later one is as well.
    assert re.search(r"resuming at step (8|12|16|20)\b", two_ranks.with_suffix(".resumed").read_text())


@pytest.mark.nightly
def test_two_ranks_that_are_interrupted_save_their_step_and_one_rank_resumes(two_ranks, finish, tmp_path):
    """The LM is slow, so that the signal comes while all wait for it; no checkpoint was due at the step."""
    run = tmp_path / "run"
    slow = ("lm.path=stand_in:0.3", "data.source=null", f"data.prepared={two_ranks / 'data'}")
    process = start(run, TWO, "checkpoint.every_steps=100", *slow)
    wait_for_step(run, 6, process)
    others = [child for child in descendants(process.pid) if "TrainerRank" in name_of(child)]
    began = time.monotonic()
    for number in (process.pid, *(other.pid for other in others)):  # as a batch system does
        os.kill(number, signal.SIGTERM)
    output = wait_for(process, status=75, seconds=200)
    assert time.monotonic() - began < 20 and not any(psutil.pid_exists(other.pid) for other in others)
    saved = len(metrics(run))
    assert f"saved step {saved}: the same command resumes from there" in output
    assert f"resuming at step {saved}" in finish(run, ONE_IN_TWO_PARTS, *slow)
    assert what_must_be_equal(run) == what_must_be_equal(two_ranks)


def test_the_shares_of_all_ranks_and_parts_are_the_batch_in_its_order():
    rows = np.arange(12)
    retrieved = RetrievedBatch(3, 1, 0, 0, rows, rows[:, None], rows[:, None] / 10)
    batch = ScoredBatch(retrieved, -rows[:, None], rows + 1)
    shares = [share_of(batch, rank, 2, Position(3, part, 3)) for rank in range(2) for part in range(3)]
    for name in ("query_rows", "doc_rows", "similarities"):
        parts = [getattr(share.retrieved, name) for share in shares]
        assert np.array_equal(np.concatenate(parts), getattr(retrieved, name))
    assert np.array_equal(np.concatenate([share.sum_logprobs for share in shares]), batch.sum_logprobs)
    assert np.array_equal(np.concatenate([share.num_tokens for share in shares]), batch.num_tokens)
    assert {len(share.num_tokens) for share in shares} == {2}
    assert all(share.retrieved.step == 3 for share in shares)


# A rank that hangs or fails ends the collectives of rank 0 ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize(
    "hangs", [pytest.param(True, id="stopped"), pytest.param(False, id="fails", marks=pytest.mark.nightly)]
)
def test_a_rank_that_hangs_or_fails_ends_a_collective(ray_session, tmp_path, hangs):
    """Rank 0 is this process. It waits in an all-reduce. A rank that fails is named long before the time-out."""

    def join(environment) -> dist.ProcessGroup:
        environment.join("gloo", timedelta(minutes=10))
        group = dist.new_group(timeout=timedelta(seconds=8) if hangs else timedelta(minutes=10))
        dist.all_reduce(torch.ones(1), group=group)
        return group

    def reduce_for_ever(folder: Path, fails: bool, environment) -> None:
        group = join(environment)
        (folder / "partial").write_text(str(os.getpid()))
        (folder / "partial").rename(folder / "pid")
        if fails:
            raise ValueError("of its own")
        while True:
            dist.all_reduce(torch.ones(1), group=group)

    expected = "the trainer's ranks cannot reach each other" if hangs else "trainer rank 1 died: .*of its own"
    with (
        pytest.raises(RunError, match=rf"{expected}.*; the same command resumes from the newest checkpoint"),
        other_ranks(partial(reduce_for_ever, tmp_path, not hangs), 2, 0.0, 1) as others,
    ):
        group = join(others.environment)
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        if hangs:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        while True:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ["Searcher", pytest.param("gcs_server", marks=pytest.mark.nightly)])
def test_sigterm_ends_a_run_within_30_seconds_though_an_actor_hangs(begin, tmp_path, name):
    """Nothing is saved but by the signal, which comes in the middle of a slow step, and no process is left."""
    run = tmp_path / "run"
    process = begin(run, "lm.path=stand_in:0.2", "checkpoint.every_steps=100")
    wait_for_step(run, 3, process)
    children = descendants(process.pid)
    hung = [child for child in children if name in name_of(child)]
    assert hung, [name_of(child)[:60] for child in children]
    for child in hung:
        child.suspend()
    time.sleep(3)  # until everything that can waits for it
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75 and time.monotonic() - began < 30, output
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert f"saved step {len(metrics(run))}: the same command resumes from there" in output


# Addresses that a run listens on --------------------------------------------------------------------------------


# A user's program may have imported Ray, and even used it, long before.
LISTENS = """
import os, signal, stat, sys, psutil
from pathlib import Path
import ray
from replug.config.load import load_config
from replug.cluster.environment import private_folder
from replug.cluster.ray_cluster import ray_cluster

def state():
    return {**os.environ}, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

config, before = load_config(Path("configs/debug.yaml"), []), state()
with ray_cluster(config, roles=()):
    from ray._private.authentication.authentication_utils import is_token_auth_enabled
    assert is_token_auth_enabled() and (private_folder() / "token").stat().st_mode & 0o777 == 0o600
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert session.is_relative_to(private_folder()), session
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {c.laddr.ip for p in mine for c in p.net_connections() if c.status == "LISTEN"}
    print(oct(stat.S_IMODE(private_folder().stat().st_mode)), *sorted(listening))
    print(private_folder())
assert state() == before and not is_token_auth_enabled()
"""


def addresses() -> set[str]:
    return {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_the_store_of_the_ranks_listens_on_its_address_alone():
    before = addresses()
    store = open_store("127.0.0.1")
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
    assert addresses() - before <= {"127.0.0.1"}


@pytest.mark.slow
def test_a_cluster_of_our_own_is_on_loopback_in_a_folder_of_this_user():
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    modes, folder = done.stdout.splitlines()[-2:]
    mode, *listening = modes.split()
    assert mode == "0o700"
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}  # loopback in both notations
    assert not os.path.exists(folder)  # noqa: PTH110 - as a user would look


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_loss_that_is_not_finite_on_rank_1_alone_ends_both_ranks_with_its_text(replug, tmp_path, monkeypatch):
    """Rank 1 has the last row of the batch, whose sums were finite when they came."""
    run, take = tmp_path / "run", BatchPipeline.take

    def poisoned(pipeline: BatchPipeline, step: int):
        scored = take(pipeline, step)
        sums = scored.sum_logprobs.copy()
        sums[-1] = np.nan
        return replace(scored, sum_logprobs=sums) if step == 5 else scored

    monkeypatch.setattr(BatchPipeline, "take", poisoned)
    ended = replug(*arguments(run, ("resources.train=2",), "train", "debug"))
    assert ended.status == 1
    assert re.search(r"^replug: step 5: the loss of 1 of \d+ texts is not finite \(nan\): \S+; ", ended.errors, re.M)
    assert RunDirectory(run).checkpoint_marks()[-1].step == 4


# GPUs, with torch.cuda patched: nothing computes on them ---------------------------------------------------


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Config:
    """On a machine of eight GPUs, in a step of SLURM's, whose variables Lightning takes for ranks that srun made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    step = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "x"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    return load_config(ROOT / "configs/paper.yaml")


def test_a_rank_trains_on_the_gpu_that_ray_gave_it_and_waits_for_others_that_end(paper: Config, tmp_path: Path) -> None:
    """Rank 0 sees all GPUs of its node, the others their own alone."""
    trainer = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 1, "10.0.0.1", 1234, 7))
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert trainer.strategy.root_device == torch.device("cuda", 7)
    assert (trainer.world_size, trainer.global_rank, trainer.precision) == (1, 0, "bf16-mixed")
    for rank, device in ((0, 7), (1, 0)):
        environment = RankEnvironment(rank, 2, "10.0.0.1", 1234, device)
        trainer = lightning_trainer(paper, tmp_path, [], [], environment)
        strategy = trainer.strategy
        assert isinstance(strategy, DDPStrategy) and strategy.cluster_environment is environment
        assert strategy.root_device == torch.device("cuda", device) and strategy.determine_ddp_device_ids() == [device]
        assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (2, rank, 0)
        assert (strategy.process_group_backend, strategy._timeout) == ("nccl", COLLECTIVE_PATIENCE)


# W&B offline, read back from what was written: no account, no network --------------------------------------


def value_of(tree: object, key: str) -> object:
    """The first value under a key, however deep."""
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return tree[key]
    values = (value_of(branch, key) for branch in tree.values())
    return next((value for value in values if value is not None), None)


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_is_one_run_with_every_metric_and_the_table(two_ranks: Path) -> None:
    run = two_ranks
    logs = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2, "one file for each time that the command was run, by rank 0 alone"
    assert {log.stem.removeprefix("run-") for log in logs} == {json.loads((run / "wandb.json").read_text())["id"]}
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(logs[-1])]
    last = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    measured = set().union(*metrics(run))
    assert [name for name in measured if value_of(last, name) is None] == []
    assert value_of(last, "train/loss") == pytest.approx(metrics(run)[-1]["train/loss"])
    assert value_of(last, "loss.beta") is not None
    results = json.loads((run / "results.json").read_text())["language_modelling"]["lsr"]
    for metric in ("bpb", "bpb - replug"):
        assert value_of(last, f"results/lsr/{metric}") == pytest.approx(results[metric]["value"])
