"""GPUs that are here and that torch cannot use are told; a machine without any, or with hidden ones, says nothing."""

from pathlib import Path

import pytest
import torch

import replug.models.hardware
from replug.commands.doctor import cuda
from replug.commands.prepare import make_index
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.models.hardware import check_gpus, default_device, unusable_gpus
from replug.train.run import train


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver with one GPU, and a torch that finds none."""

    def install(has_driver: bool = True, devices: tuple[str, ...] = ("nvidia0",)) -> Path:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(replug.models.hardware, "DRIVER", tmp_path / "version")
        monkeypatch.setattr(replug.models.hardware, "DEVICES", tmp_path)
        for name in devices:
            (tmp_path / name).touch()
        if has_driver:
            (tmp_path / "version").touch()
        return tmp_path

    return install


def test_gpus_that_torch_cannot_use_are_told_with_its_version_and_the_fix(driver):
    driver()
    with pytest.raises(UserError, match=r"torch .* with CUDA .*docs/clusters\.md") as caught:
        check_gpus()
    assert str(caught.value).endswith("hide the GPUs: CUDA_VISIBLE_DEVICES= replug ...")
    assert not cuda().is_ok


@pytest.mark.parametrize(
    ("has_driver", "devices", "visible"),
    [
        (False, ("nvidia0",), None),
        (True, (), None),
        (True, ("nvidiactl",), None),
        *((True, ("nvidia0",), hidden) for hidden in ("", "-1", "NoDevFiles")),
    ],
)
def test_a_machine_without_a_driver_or_a_device_or_with_hidden_ones_runs_on_the_cpu(
    driver, monkeypatch, has_driver, devices, visible
):
    driver(has_driver, devices)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_gpus()
    assert unusable_gpus() is None and default_device().type == "cpu"


def test_no_command_begins_beside_gpus_that_torch_cannot_use(driver, debug_config: Config, tmp_path):
    driver()
    debug_config.run_dir = str(tmp_path / "run")
    for command in (train, make_index):
        with pytest.raises(UserError, match="GPUs are here"):
            command(debug_config)
    assert not (tmp_path / "run").exists()
