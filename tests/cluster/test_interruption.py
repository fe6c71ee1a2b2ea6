"""A signal ends a process in time, wherever its main thread is: also in a library that waits and runs no Python."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.command_line import ROOT

pytestmark = pytest.mark.slow

# The main thread waits for a lock that it holds: no signal handler of Python's runs before it has it.
SCRIPT = """
import ctypes, signal, subprocess, sys, time
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

def run():
    print(child.pid, flush=True)
    while True:
        time.sleep(0.05)

def wait():
    print(child.pid, flush=True)
    while True:
        time.sleep(0.05)
        interrupted.check()

interrupted = Interruption()
if sys.argv[2:] != ["library"]:
    signal.signal(signal.SIGINT, lambda *_: None)  # any handler, as the command line has one
with interrupted.installed(), interrupted.installed():
    if sys.argv[1] == "outside":
        hang()
    with interrupted.deferred():
        {"hangs": hang, "runs": run, "waits": wait}[sys.argv[1]]()
"""


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def interrupted(how: str, by: list[signal.Signals], processes: list[subprocess.Popen]) -> tuple[int, str, float]:
    """Status, what it said, and the seconds from the first signal on; its stopped child must be gone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *how.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    processes.append(process)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    time.sleep(0.2)
    begun = time.monotonic()
    said = ""
    for signum, is_last in zip(by, [*[False] * (len(by) - 1), True], strict=True):
        process.send_signal(signum)
        if signum == signal.SIGINT and not is_last:  # two of one kind that are both still to come are one
            assert process.stderr is not None
            said += process.stderr.readline()
    said += process.communicate(timeout=100)[1]
    if how.startswith(("waits", "runs library")):
        child.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    return process.returncode, said, time.monotonic() - begun


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_run_whose_main_thread_hangs_ends_in_time_and_says_so(by, begun):
    status, said, seconds = interrupted("hangs", [by, by], begun)
    assert status == 75
    assert said == (f"replug: interrupted by {by.name}; the step is not saved after 1 s; the same command resumes\n")
    assert 0.9 < seconds < 20


@pytest.mark.parametrize(("by", "ends_with"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_outside_the_steps_it_ends_at_once_though_the_main_thread_hangs(by, ends_with, begun):
    status, said, seconds = interrupted("outside", [by], begun)
    assert status == ends_with and said.startswith("replug: interrupted by ") and said.count("\n") == 1
    assert seconds < 20


SAVING = "replug: Ctrl-C: saving the current step; a second Ctrl-C ends at once, without it\n"


@pytest.mark.parametrize("how", ["hangs", "runs"])
def test_a_second_ctrl_c_ends_at_once_wherever_the_main_thread_is(how, begun):
    status, said, _ = interrupted(how, [signal.SIGINT, signal.SIGINT], begun)
    assert (status, said) == (
        130,
        SAVING + "replug: interrupted by Ctrl-C; finished work is kept; run the same command again\n",
    )


def test_a_run_that_answers_the_signal_is_left_to_itself(begun):
    status, said, _ = interrupted("waits", [signal.SIGTERM], begun)
    assert status == 1  # what the command line makes 75 of
    assert said.strip().endswith("Interrupted: interrupted by SIGTERM; the same command resumes")


def test_a_closed_terminal_saves_the_step_and_a_process_under_nohup_goes_on(begun):
    environment, (master, slave) = {**os.environ, "PYTHONPATH": str(ROOT)}, pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "waits"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        env=environment,
        # The tests may run under nohup, whose children ignore it too.
        preexec_fn=lambda: (
            os.setsid(),
            fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            signal.signal(signal.SIGHUP, signal.SIG_DFL),
        ),
    )
    begun.append(process)
    os.close(slave)
    child = psutil.Process(int(os.read(master, 100)))
    os.close(master)
    assert process.wait(timeout=20) == 1, "it raised Interrupted, of which the command line makes 75"
    child.kill()
    wrapped = ["nohup", sys.executable, "-c", SCRIPT, "runs"]
    ignoring = subprocess.Popen(wrapped, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    begun.append(ignoring)
    child = psutil.Process(int(ignoring.stdout.readline()))
    ignoring.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        ignoring.wait(timeout=1.5)
    child.kill()


def test_in_a_users_program_ctrl_c_is_a_keyboard_interrupt(begun):
    status, said, _ = interrupted("runs library", [signal.SIGINT], begun)
    assert status == -signal.SIGINT and said.strip().endswith("KeyboardInterrupt")
