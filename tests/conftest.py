"""One Ray for each test process, which commands that tests call join; one run that all tests look at; a configuration.

What a test process needs first (a cluster, a finished run) it makes when the first test asks for it. Ray itself knows
one cluster for each process: a test either uses `ray_session`, or calls commands, which join and leave by themselves.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before Ray is imported, which reads these once: no token file in the home directory, loopback only, and no workers
# started ahead: ours want an environment of their own, so that those would only take the cores. Workers are as
# important as the tests that wait for them: at Ray's own niceness the other test process starves them.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
# On a machine that is busy Ray's own processes may not answer for a minute, after which Ray ends the test process.
os.environ.setdefault("RAY_health_check_timeout_ms", "60000")
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of every role: other test processes want the cores too
# As the command line has it, before transformers is imported.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests start hundreds of processes: each would compile our modules anew, seconds a command, where a machine's
# environment forbids the cache.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

from replug.commands.cli import log_to_stderr
from replug.config.load import load_config
from replug.config.schema import Config
from tests.support.command_line import ROOT, CommandLine
from tests.support.local_cluster import join, local_cluster
from tests.support.made_once import made_once

log_to_stderr()  # as the command line does, so that tests read what a user would


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A cluster of eight logical CPUs on loopback, which ends with the test process."""
    with local_cluster({"num_cpus": 8, "object_store_memory": 256 * 2**20}) as cluster:
        yield str(cluster.address)


@pytest.fixture(scope="module")
def ray_session(ray_address: str) -> Iterator[None]:
    """Connected to Ray while a file's tests run, which share actors; what they leave behind ends with the file."""
    import ray

    join(ray_address)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def replug(request: pytest.FixtureRequest) -> CommandLine:
    """The command line in this process: no imports to wait for, and no Ray to start but the tests' own."""
    return CommandLine(lambda: request.getfixturevalue("ray_address"))


@pytest.fixture(scope="session")
def finish(replug: CommandLine) -> Callable[..., str]:
    """`finish(run_dir, *overrides, command="train", config="debug")`: what a command printed that ended well."""
    return replug.finish


@pytest.fixture
def here() -> Iterator[CommandLine]:
    """The command line without Ray, which is seconds faster: LM, builders and searchers are of this process."""
    from tests.support.evaluating import without_ray

    with without_ray() as command_line:
        yield command_line


@pytest.fixture(scope="session")
def quiet_run(tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., str]) -> Path:
    """A finished run of the whole loop on stand-ins, which nothing disturbed. Tests look at it and change nothing."""
    return made_once(tmp_path_factory, "quiet", lambda run: finish(run))


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
