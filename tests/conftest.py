"""One Ray for the whole session, and the debug configuration."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before Ray is imported, which reads these once: no token file in the home directory, and loopback only.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from replug.commands.console import log_to_stderr
from replug.configs.load import load_config
from replug.configs.schema import Config
from tests.support.command_line import finish

ROOT = Path(__file__).parent.parent

log_to_stderr()  # as the command line does, so that tests read what a user would


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Eight logical CPUs on loopback; every test shares them, so every test closes its actors."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",  # a cluster of another test, or of the user, is none of ours
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the whole loop on stand-ins, which nothing disturbed."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    finish(run)
    return run


@pytest.fixture
def debug_config(tmp_path: Path) -> Config:
    """configs/debug.yaml, writing under the test's own folder."""
    return load_config(ROOT / "configs/debug.yaml", [f"run_dir={tmp_path / 'run'}"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Said here, where the reports of all test processes come together."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if missing := [reason for reason in reasons if "NO SLURM HERE" in reason]:
        terminalreporter.write_sep("!", "SLURM JOBS WERE NOT TESTED", red=True, bold=True)
        terminalreporter.write_line(missing[0])
