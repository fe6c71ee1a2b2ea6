"""Measure a GPU, each stage in a process of its own, and write a report: numbers, speed and memory.

    python -m benchmarks.gpu                    # all stages, a quarter of an hour of one GPU; no network is needed
    python -m benchmarks.gpu scoring training   # some of them
    python -m benchmarks.gpu --pretend          # small sizes on the CPU: tries the script itself

OUT (default: runs/gpu) gets figures.jsonl, a log of each stage, and report.md. Exit status: 0 all as asked, 1 some not,
2 no GPU here. benchmarks/gpu/archives.sh brings it to a machine without a network.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import answers, encoding, runs, scoring, searching, shares
from benchmarks.gpu.kit import Figure, Kit
from replug.train.run_dir import describe_environment

ROOT = Path(__file__).parents[2]
PRODUCTS = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "GPT-2 XL's MLP": (8192, 1600, 6400),
    "BERT's": (32_768, 768, 3072),
}


def machine(kit: Kit) -> None:
    """Say what the machine is, and how fast its products and copies are."""
    environment = describe_environment()
    kit.say("Python, torch, CUDA", f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}")
    kit.say("packages", json.dumps(environment["packages"]))
    kit.say("commit", str(environment["git_commit"]))
    kit.say("cores", len(os.sched_getaffinity(0)))
    if kit.pretends:
        return
    query = "name,memory.total,driver_version,compute_mode,power.limit"
    found = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    kit.say("GPUs", found.stdout.strip().replace("\n", "; "))
    kit.flops_of_product(64, 64, 64)
    kit.wait()
    free, total = torch.cuda.mem_get_info()
    kit.say("CUDA context and cuBLAS of one process", (total - free - torch.cuda.memory_reserved()) / 1e9, "GB", 1.0)
    for name, (m, k, n) in PRODUCTS.items():
        kit.say(f"bfloat16 product, {name}", kit.flops_of_product(m, k, n) / 1e12, "TFLOP/s")


STAGES = {
    "machine": (machine, 60),
    "scoring": (scoring.scoring, 120),
    "real_lm": (scoring.real_lm, 90),
    "answers": (answers.drawn_answers, 90),
    "embedding": (encoding.embedding, 90),
    "training": (encoding.training, 120),
    "search": (searching.exact_search, 60),
    "sharing": (shares.sharing, 120),
    "runs": (runs.short_runs, 300),
    "ranks": (runs.two_ranks, 200),
    "quickstart": (runs.quickstart, 300),
}
PRETENDED_SECONDS = 600


def run_stages(names: list[str], folder: Path, pretends: bool) -> dict[str, str]:
    """Run stages in processes of their own, so that one that fails or hangs hides no other; return what went wrong."""
    problems = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.gpu", name, "--out", str(folder), "--here"]
        start = time.monotonic()
        problem = _run(command + ["--pretend"] * pretends, PRETENDED_SECONDS if pretends else STAGES[name][1])
        print(f"=== {name}: {problem or 'ended'} after {time.monotonic() - start:.0f} s", flush=True)
        if problem:
            problems[name] = problem
    return problems


def _run(command: list[str], seconds: float) -> str:
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(seconds)
        return f"failed with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # lets a run end its Ray
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return f"not done after {seconds} s"


def read_figures(folder: Path) -> list[Figure]:
    """Return the figures that stages have told so far."""
    path = folder / "figures.jsonl"
    return [Figure(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def write_report(folder: Path, figures: list[Figure], problems: dict[str, str]) -> None:
    """Write a table of each stage's figures, those that are not as asked marked."""
    lines = ["# What a GPU did", ""]
    for stage in STAGES:
        found = [figure for figure in figures if figure.stage == stage]
        if not found and stage not in problems:
            continue
        lines += [f"## {stage}", ""]
        if stage in problems:
            lines += [f"**{problems[stage]}**", ""]
        if found:
            lines += ["| figure | found | asked |", "|---|---|---|"]
        for figure in found:
            mark = "" if figure.is_as_asked else " **missed**"
            lines.append(f"| {figure.name} | {figure.shown} | {figure.asked}{mark} |")
        lines.append("")
    (folder / "report.md").write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"some of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    given = parser.parse_args()
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"{', '.join(sorted(unknown))}: no such stage; expected some of {', '.join(STAGES)}")
    folder = given.out.absolute()
    if given.here:
        STAGES[given.stages[0]][0](Kit(given.stages[0], folder, given.pretend))
        return 0
    if not torch.cuda.is_available() and not given.pretend:
        print("no GPU that torch can use; see `replug doctor`. --pretend tries the script without one")
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    problems = run_stages(given.stages or list(STAGES), folder, given.pretend)
    figures = read_figures(folder)
    write_report(folder, figures, problems)
    missed = [figure for figure in figures if not figure.is_as_asked]
    print(f"{len(figures)} figures, {len(missed)} not as asked: {folder / 'report.md'}")
    return int(bool(problems or missed))


if __name__ == "__main__":
    sys.exit(main())
