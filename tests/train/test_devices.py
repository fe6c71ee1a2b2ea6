"""The device, ranks and precision of Lightning's trainer on GPUs, with torch.cuda patched: nothing computes on them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from replug.cluster.gpus import Busy, DeviceUse
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.train.fitting import lightning_trainer
from replug.train.ranks import COLLECTIVE_PATIENCE, RankEnvironment
from replug.train.report import device_shares
from replug.train.run_dir import RunDirectory
from replug.train.step_metrics import DeviceShares
from tests.support.command_line import ROOT


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Config:
    """On a machine of eight GPUs, in a step of SLURM's, whose variables Lightning takes for ranks that srun made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    step = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "x"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    return load_config(ROOT / "configs/paper.yaml")


def test_a_rank_alone_trains_on_the_gpu_that_ray_gave_it(paper: Config, tmp_path: Path) -> None:
    trainer = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 1, "10.0.0.1", 1234, 7))
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert trainer.strategy.root_device == torch.device("cuda", 7)
    assert (trainer.world_size, trainer.global_rank, trainer.precision) == (1, 0, "bf16-mixed")


@pytest.mark.parametrize(("rank", "device"), [(0, 7), (1, 0)])
def test_a_rank_among_others_has_its_gpu_its_number_and_waits_that_end(
    paper: Config, tmp_path: Path, rank: int, device: int
) -> None:
    """Rank 0 sees all GPUs of its node, the others their own alone."""
    environment = RankEnvironment(rank, 2, "10.0.0.1", 1234, device)
    trainer = lightning_trainer(paper, tmp_path, [], [], environment)
    strategy = trainer.strategy
    assert isinstance(strategy, DDPStrategy) and strategy.cluster_environment is environment
    assert strategy.root_device == torch.device("cuda", device) and strategy.determine_ddp_device_ids() == [device]
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (2, rank, 0)
    assert (strategy.process_group_backend, strategy._timeout) == ("nccl", COLLECTIVE_PATIENCE)
    assert trainer.precision == "bf16-mixed"


# Which device worked for what, over a training that is interrupted ---------------------------------------------


def train(run: RunDirectory, steps: range, state: dict | None = None, max_steps: int = 250) -> dict:
    """Steps of 2 seconds, 1 of them training and half of one encoding; GPU a:1 scores for 1.5 of them."""
    use = DeviceUse()
    use.note("embed", Busy(9.0, ("a:1",)))  # the first index
    shares = DeviceShares(run.device_use, max_steps, lambda: [("a:0",), ("b:0",)], use)
    times = {"time/train_seconds": 1.0, "time/retrieve_seconds": 0.5, "time/step_seconds": 2.0, "train/loss": 3.0}
    trainer: Any = SimpleNamespace(callback_metrics=times, max_steps=max_steps, loggers=[])
    if state is not None:
        shares.load_state_dict(state)
    shares.on_train_start(trainer, SimpleNamespace())  # type: ignore[arg-type]
    for step in steps:
        use.note("score", Busy(1.5, ("a:1",)))
        shares.on_train_batch_end(trainer, SimpleNamespace(), None, Position(step), step)  # type: ignore[arg-type]
    return shares.state_dict()


def test_a_row_is_of_some_steps_and_the_last_row_of_the_rest(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    train(run, range(249), max_steps=249)
    rows = run.read_device_use()
    assert [row["step"] for row in rows] == [*range(1, 248, 2), 248]
    busy = {"a:1": {"score": 3.0}, "a:0": {"train": 3.0}, "b:0": {"train": 2.0}}
    assert rows[0] == {"step": 1, "seconds": 4.0, "busy": busy}
    assert rows[-1]["seconds"] == 2.0


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    run, whole = RunDirectory(tmp_path), RunDirectory(tmp_path / "whole")
    state = train(run, range(5))  # a checkpoint in the middle of a row
    train(run, range(5, 9), state)  # killed after it
    run.forget_after(5)
    train(run, range(5, 12), state)
    whole.path.mkdir()
    train(whole, range(12))
    assert run.read_device_use() == whole.read_device_use()


def test_shares_of_roles_that_take_turns_may_add_up_above_one_and_nothing_is_idle_then() -> None:
    crowded = {"step": 1, "seconds": 4.0, "busy": {"a:10": {"score": 3.0, "embed": 2.0}, "a:2": {"train": 1.0}}}
    shares = device_shares([crowded])
    assert list(shares) == ["a:2", "a:10"]
    assert shares["a:10"] == {"score": 0.75, "embed": 0.5, "search": 0.0, "train": 0.0, "idle": 0.0}
