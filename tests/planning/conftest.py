import pytest

from replug.config.load import load_config
from replug.config.schema import Config
from tests.support.command_line import ROOT


@pytest.fixture
def paper() -> Config:
    return load_config(ROOT / "configs/paper.yaml")
