"""A signal ends a process in time, wherever its main thread is: also in a library that waits and runs no Python."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.command_line import ROOT

# The main thread waits for a lock that it holds: no signal handler of Python's runs before it has it.
SCRIPT = """
import ctypes, subprocess, sys, time
from replug.cluster import interruption
from replug.cluster.interruption import Interruption

interruption.SECONDS_TO_END = dict.fromkeys(interruption.SIGNALS, 1.0)
stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
child = subprocess.Popen([sys.executable, "-c", stops], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def hang():
    print(child.pid, flush=True)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)

def wait():
    print(child.pid, flush=True)
    while True:
        time.sleep(0.05)
        interrupted.check()

interrupted = Interruption()
with interrupted.installed(), interrupted.installed():
    if sys.argv[1] == "outside":
        hang()
    with interrupted.deferred(lambda: "step 7 is saved"):
        {"hangs": hang, "waits": wait}[sys.argv[1]]()
"""


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def interrupted(how: str, by: signal.Signals, processes: list[subprocess.Popen]) -> tuple[int, str, float]:
    """Status, what it said, and the seconds from the signal on; its stopped child must be gone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    processes.append(process)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    time.sleep(0.2)
    begun = time.monotonic()
    process.send_signal(by)
    process.send_signal(by)
    _, said = process.communicate(timeout=20)
    if how == "waits":
        child.kill()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    return process.returncode, said, time.monotonic() - begun


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_run_whose_main_thread_hangs_ends_in_time_and_says_what_is_saved(by, begun):
    status, said, seconds = interrupted("hangs", by, begun)
    assert status == 75
    assert said == (
        f"replug: interrupted by {by.name}; after 1 s it still waits in its start; step 7 is saved; "
        "the same command goes on\n"
    )
    assert 0.9 < seconds < 5


def test_outside_the_steps_it_ends_at_once_though_the_main_thread_hangs(begun):
    status, said, seconds = interrupted("outside", signal.SIGTERM, begun)
    assert (status, said) == (75, "")
    assert seconds < 5


def test_a_run_that_answers_the_signal_is_left_to_itself(begun):
    status, said, _ = interrupted("waits", signal.SIGTERM, begun)
    assert status == 1  # what the command line makes 75 of
    assert said.strip().endswith("Interrupted: interrupted by SIGTERM; the same command goes on")
