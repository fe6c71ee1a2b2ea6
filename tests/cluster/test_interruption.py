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


RESUMES = "the same command resumes\n"
SAVING = "replug: Ctrl-C: saving the current step; a second Ctrl-C ends at once, without it\n"
ENDED = "replug: interrupted by {}; finished work is kept; run the same command again\n"
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@pytest.mark.parametrize(
    ("how", "by", "status", "ending"),
    [
        ("hangs", [USR1, USR1], 75, f"replug: interrupted by SIGUSR1; the step is not saved after 1 s; {RESUMES}"),
        ("outside", [TERM], 75, ENDED.format("SIGTERM")),
        ("outside", [INT], 130, ENDED.format("Ctrl-C")),
        ("hangs", [INT, INT], 130, SAVING + ENDED.format("Ctrl-C")),
        ("runs", [INT, INT], 130, SAVING + ENDED.format("Ctrl-C")),
        ("waits", [TERM], 1, f"Interrupted: interrupted by SIGTERM; {RESUMES}"),  # the command line makes 75 of it
        ("runs library", [INT], -signal.SIGINT, "KeyboardInterrupt\n"),  # in a user's program
    ],
)
def test_a_signal_ends_a_process_in_time_with_a_line(how, by, status, ending, begun):
    """Its stopped child must be gone too, where it had to end by force."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *how.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    begun.append(process)
    child = psutil.Process(int(process.stdout.readline()))
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    time.sleep(0.2)
    began, said = time.monotonic(), ""
    process.send_signal(by[0])
    if len(by) > 1:
        said = process.stderr.readline() if by[0] == INT else ""  # two of one kind that are both still to come are one
        process.send_signal(by[1])
    said += process.communicate(timeout=100)[1]
    seconds = time.monotonic() - began
    if how in ("waits", "runs library"):
        child.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert process.returncode == status and said.endswith(ending), said
    assert said == ending or how in ("waits", "runs library")
    assert (0.9 if by == [USR1, USR1] else 0) < seconds < 20


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
