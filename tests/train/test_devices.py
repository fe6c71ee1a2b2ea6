"""The device, ranks and precision of Lightning's trainer on GPUs, with torch.cuda patched: nothing computes on them."""

from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from replug.cluster import gpus
from replug.config.load import load_config
from replug.config.schema import Config
from replug.train.ranks import COLLECTIVE_PATIENCE, RankEnvironment
from replug.train.trainer import lightning_trainer
from tests.support.command_line import ROOT


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Config:
    """On a machine of eight GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return load_config(ROOT / "configs/paper.yaml")


def test_a_rank_alone_trains_on_the_gpu_that_ray_gave_it(paper: Config, tmp_path: Path) -> None:
    trainer = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 1, "10.0.0.1", 1234, 7))
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert trainer.strategy.root_device == torch.device("cuda", 7)
    assert (trainer.world_size, trainer.global_rank) == (1, 0)
    assert trainer.precision == "bf16-mixed"


@pytest.mark.parametrize(("rank", "device"), [(0, 7), (1, 0)])
def test_a_rank_among_others_has_its_gpu_its_number_and_waits_that_end(
    paper: Config, tmp_path: Path, rank: int, device: int
) -> None:
    """Rank 0 sees all GPUs of its node, the others their own alone."""
    environment = RankEnvironment(rank, 2, "10.0.0.1", 1234, device)
    trainer = lightning_trainer(paper, tmp_path, [], [], environment)
    strategy = trainer.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.root_device == torch.device("cuda", device)
    assert strategy.determine_ddp_device_ids() == [device]
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (2, rank, 0)
    assert strategy.cluster_environment is environment
    assert strategy.process_group_backend == "nccl"
    assert strategy._timeout == COLLECTIVE_PATIENCE
    assert trainer.precision == "bf16-mixed"


def test_slurm_does_not_make_the_ranks(paper: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes the variables of a step for ranks that srun made, and would wait for them."""
    step = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "x"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    alone = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 1, "10.0.0.1", 1234, 3))
    assert isinstance(alone._accelerator_connector.cluster_environment, LightningEnvironment)
    assert (alone.world_size, alone.global_rank, alone.strategy.root_device) == (1, 0, torch.device("cuda", 3))
    first = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 2, "10.0.0.1", 1234, 3))
    assert (first.world_size, first.global_rank, first.strategy.root_device) == (2, 0, torch.device("cuda", 3))


def test_a_rehearsal_trains_on_the_processor(paper: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gpus.Rehearsal(8, 80.0).environment().items():
        monkeypatch.setenv(name, value)
    trainer = lightning_trainer(paper, tmp_path, [], [], RankEnvironment(0, 2, "10.0.0.1", 1234, 0))
    assert isinstance(trainer.strategy, DDPStrategy)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.strategy.process_group_backend == "gloo"


def test_a_trainer_that_is_told_to_use_the_processor_leaves_the_gpus(paper: Config, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/paper.yaml", ["train.accelerator=cpu", "train.precision=float32"])
    trainer = lightning_trainer(config, tmp_path, [], [], RankEnvironment(0, 1, "10.0.0.1", 1234))
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.precision == "32-true"
