"""A prepared set of the debug configuration, and a module on its tiny encoder."""

from pathlib import Path

import pytest
import torch

from replug.configs.schema import Config
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.models.preparing import prepared_set
from replug.train.fitting import lsr_module
from replug.train.module import LSRModule


@pytest.fixture
def data(debug_config: Config, tmp_path: Path) -> PreparedSet:
    return prepared_set(debug_config, tmp_path / "data")


@pytest.fixture
def module(debug_config: Config, data: PreparedSet) -> LSRModule:
    torch.manual_seed(0)
    return lsr_module(debug_config, load_encoder(debug_config.retriever), data)
