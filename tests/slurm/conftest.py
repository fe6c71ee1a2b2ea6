"""A real SLURM for the tests of this folder, or a loud reason why they were skipped (tests/conftest.py)."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.local_slurm import LocalSlurm, SlurmMissing


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes on this machine, idle at first."""
    if os.geteuid() != 0:
        pytest.skip("only root can start SLURM's daemons for these tests")
    try:
        started = LocalSlurm()
    except SlurmMissing as error:
        pytest.skip(f"NO SLURM HERE: {error}")
    with started:
        yield started
