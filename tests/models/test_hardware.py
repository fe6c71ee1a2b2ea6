"""GPUs that are here and that torch cannot use are told; a machine without any, or with hidden ones, says nothing."""

from pathlib import Path

import pytest
import torch

import replug.models.hardware
from replug.commands.doctor import State, cuda
from replug.commands.prepare import make_index
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.models.hardware import check_gpus, default_device, unusable_gpus
from replug.train.run import train

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver of the given text with one GPU, and a torch of the given CUDA that finds none."""

    def install(
        text: str | None = PROPRIETARY, cuda: str | None = "13.0", devices: tuple[str, ...] = ("nvidia0",)
    ) -> Path:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(replug.models.hardware, "DRIVER", tmp_path / "version")
        monkeypatch.setattr(replug.models.hardware, "DEVICES", tmp_path)
        for name in devices:
            (tmp_path / name).touch()
        if text is not None:
            (tmp_path / "version").write_text(text)
        return tmp_path

    return install


@pytest.mark.parametrize(
    ("text", "built_for", "message"),
    [
        (PROPRIETARY, "13.0", r"GPUs of driver 550.54.15: its CUDA 13.0 wants a driver from 580 on.*cu126"),
        (OPEN, "13.0", r"driver 580.65.06: its CUDA 13.0 should; see nvidia-smi"),
        (PROPRIETARY, None, r"a GPU is here \(driver 550.54.15\), but torch .* is built without CUDA: .*cu126"),
    ],
)
def test_gpus_that_torch_cannot_use_are_told_with_both_versions_and_the_fix(driver, text, built_for, message):
    driver(text, built_for)
    with pytest.raises(UserError, match=message) as caught:
        check_gpus()
    assert str(caught.value).endswith("hide the GPUs: CUDA_VISIBLE_DEVICES= replug ...")


@pytest.mark.parametrize(("text", "devices"), [(None, ("nvidia0",)), (PROPRIETARY, ()), (PROPRIETARY, ("nvidiactl",))])
def test_a_machine_without_a_driver_or_a_device_runs_on_the_cpu(driver, text, devices):
    driver(text, devices=devices)
    assert unusable_gpus() is None and default_device().type == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_are_not_missed(driver, monkeypatch, hidden):
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check_gpus()
    assert default_device().type == "cpu"


def test_no_command_begins_beside_gpus_that_torch_cannot_use(driver, debug_config: Config, tmp_path):
    driver()
    debug_config.run_dir = str(tmp_path / "run")
    for command in (train, make_index):
        with pytest.raises(UserError, match="wants a driver"):
            command(debug_config)
    assert not (tmp_path / "run").exists()


def test_the_doctor_finds_them_wrong(driver):
    driver()
    found = cuda()
    assert found.state is State.wrong and "wants a driver from 580 on" in found.found
