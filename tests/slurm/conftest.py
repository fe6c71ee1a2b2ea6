"""A real SLURM for the tests of this folder, or a loud reason why they were skipped."""

from collections.abc import Iterator

import pytest

from tests.slurm.local_slurm import LocalSlurm, SlurmMissing

SKIPPED: list[str] = []


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes on this machine, idle at first."""
    try:
        started = LocalSlurm()
    except SlurmMissing as error:
        SKIPPED.append(str(error))
        pytest.skip(f"NO SLURM HERE: {error}")
    with started:
        yield started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SKIPPED:
        terminalreporter.write_sep("!", "SLURM JOBS WERE NOT TESTED", red=True, bold=True)
        terminalreporter.write_line(f"no SLURM could be started here: {SKIPPED[0]}")
