"""What a run wrote, how far it is, and its processes."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def metrics(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def what_must_be_equal(run: Path) -> list[tuple]:
    """Every number that must not depend on timing."""
    timed = ("time/", "index/swap_", "index/refresh_under_way", "scoring/")
    return [tuple(sorted((k, v) for k, v in row.items() if not k.startswith(timed))) for row in metrics(run)]


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until this process has logged the step; a resumed run first takes back what it does again."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        file, began = run / "metrics.jsonl", psutil.Process(process.pid).create_time()
        if file.exists() and file.stat().st_mtime > began and len(file.read_text().splitlines()) > step:
            return
        time.sleep(0.005)
    ended = "" if process.poll() is None else f"; it ended with {process.returncode}: {process.communicate()[0]}"
    raise AssertionError(f"{run} did not come to step {step}{ended}")


def heldout_bits(run: Path) -> dict[str, float]:
    """Bits per byte of the held-out texts by method, from a run's results.json."""
    results = json.loads((run / "results.json").read_text())["language_modelling"]
    return {method: of["bpb"]["value"] for method, of in results.items()}
