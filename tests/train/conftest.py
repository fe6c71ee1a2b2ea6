"""A finished run of the whole loop on stand-ins, made once by the real command."""

from pathlib import Path

import pytest

from tests.support.command_line import finish


@pytest.fixture(scope="session")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    finish(run)
    return run
