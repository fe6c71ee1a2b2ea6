"""A real SLURM for the tests of this folder, or a loud reason why they were skipped (tests/conftest.py)."""

from collections.abc import Iterator

import pytest

from tests.support.local_slurm import LocalSlurm, SlurmMissing


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes on this machine, idle at first."""
    try:
        started = LocalSlurm()
    except SlurmMissing as error:
        pytest.skip(f"NO SLURM HERE: {error}")
    with started:
        yield started
