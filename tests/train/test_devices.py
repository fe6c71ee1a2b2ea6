"""The device, ranks and precision of Lightning's trainer on GPUs, with torch.cuda patched: nothing computes on them."""

from pathlib import Path

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from replug.config.load import load_config
from replug.config.schema import Config
from replug.train.fitting import lightning_trainer
from replug.train.ranks import COLLECTIVE_PATIENCE, RankEnvironment
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
