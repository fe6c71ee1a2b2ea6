"""Every GPU path once, in ten minutes, against the CPU's numbers: for whoever has GPUs. Writes a report to send back.

    python -m benchmarks.gpu_smoke                        # on all GPUs of this machine; no network is needed
    python -m benchmarks.gpu_smoke --only train_bfloat16  # one check, with the references it needs
    python -m benchmarks.gpu_smoke --pretend-cpu          # stand-ins on the CPU: tries the script itself

OUT/report.md and OUT/report.json (default: runs/gpu_smoke) hold the machine, and of each check its figures, their
tolerances and seconds. A check runs in a process of its own under a time limit, so that one which fails or hangs hides
no other; OUT/NAME.log is what it printed. Exit status: 0 all passed, 1 some did not, 2 no GPU here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from replug.data.files import write_json

ROOT = Path(__file__).parents[1]
CHECK_SECONDS, END_SECONDS = 300, 30
NUM_TEXTS, STEPS = 24, 6
MANY_TOKENS = 10**7  # in one pass: more than the memory that the process is left with
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured; `at_most` is its tolerance, None where it is only told."""

    name: str
    value: float
    at_most: float | None = None

    @property
    def is_well(self) -> bool:
        return self.at_most is None or self.value <= self.at_most


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check works: its folder, which holds the references too, and whether the CPU stands for the GPUs."""

    folder: Path
    pretends: bool

    def device(self) -> str:
        return "cpu" if self.pretends else "cuda:0"


@dataclass(frozen=True, slots=True)
class Check:
    """What is tried, the GPUs that it takes, and the check whose numbers it is compared with."""

    run: Callable[[Place], list[Figure]]
    num_gpus: int = 1
    reference: str | None = None
    needs_faiss_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check: passed, failed, timed out or skipped, and why."""

    name: str
    state: str
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    why: str = ""


# What is tried ----------------------------------------------------------------------------------------------


def lm_on_cpu(place: Place) -> list[Figure]:
    np.save(place.folder / "lm_on_cpu.npy", _logprobs("cpu", "float32"))
    return []


def lm_float32(place: Place) -> list[Figure]:
    return _against_cpu(place, _logprobs(place.device(), "float32"), 1e-3)


def lm_bfloat16(place: Place) -> list[Figure]:
    return _against_cpu(place, _logprobs(place.device(), "bfloat16"), 0.1)


def lm_over_two_gpus(place: Place) -> list[Figure]:
    return _against_cpu(place, _logprobs(place.device(), "float32", spread=not place.pretends), 1e-3)


def lm_out_of_memory(place: Place) -> list[Figure]:
    """All texts in one pass that a small part of the memory does not hold: it is halved until it is."""
    copies = 2 if place.pretends else 64
    return _against_cpu(place, _logprobs(place.device(), "float32", num_copies=copies, of_memory=0.02), 1e-3)


def encoder_on_cpu(place: Place) -> list[Figure]:
    np.save(place.folder / "encoder_on_cpu.npy", _vectors("cpu", "float32"))
    return []


def encoder_float32(place: Place) -> list[Figure]:
    return _cosines(place, _vectors(place.device(), "float32"), 1e-4)


def encoder_bfloat16(place: Place) -> list[Figure]:
    return _cosines(place, _vectors(place.device(), "bfloat16"), 0.01)


def exact_search(place: Place) -> list[Figure]:
    """A million made-up vectors in GPU memory, a thousand of them equal: the same rows as from host memory."""
    import torch

    from replug.index_workers.exact_search import ExactShard
    from replug.index_workers.vectors import BlockVectors

    rows, rng = 20_000 if place.pretends else 1_000_000, np.random.default_rng(0)
    vectors = rng.standard_normal((rows, 384), dtype=np.float32)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    vectors[:: rows // 1000] = vectors[0]
    queries = rng.standard_normal((8, 384), dtype=np.float32)
    queries[4:] += 100 * vectors[0]  # which these like best: more documents than any margin of candidates
    stored = BlockVectors(0, [vectors], vectors.shape[1])
    start = time.monotonic()
    found, _ = ExactShard(stored, torch.device(place.device())).search(queries, 20)
    seconds = time.monotonic() - start
    expected, _ = ExactShard(stored, torch.device("cpu")).search(queries, 20)
    return [Figure("rows that differ", float((found != expected).sum()), 0), Figure("seconds with loading", seconds)]


def train_on_cpu(place: Place) -> list[Figure]:
    return _train(place, "train_on_cpu", {"train.accelerator": "cpu"}, HIDDEN)


def train_ranks_on_cpu(place: Place) -> list[Figure]:
    return _train(place, "train_ranks_on_cpu", {"train.accelerator": "cpu", **RANKS}, HIDDEN)


def trained(
    reference: str, overrides: Mapping[str, object], tolerance: float, finds_the_same: bool = True
) -> Callable[[Place], list[Figure]]:
    """A check that trains with every role on GPUs, and compares the loss of each step with a run's on the CPU.

    Vectors in bfloat16 may put documents of nearly equal similarity in another order, and other documents have another
    loss: after the first swap, whose index is of trained vectors, the difference is only told.
    """

    def run(place: Place) -> list[Figure]:
        name = f"run-{len(list(place.folder.glob('run-*')))}"
        on_gpus = {key: value for key, value in overrides.items() if not (place.pretends and key in OF_GPUS)}
        figures = _train(place, name, on_gpus, HIDDEN if place.pretends else {})
        steps, expected = _steps(place.folder / name), _steps(place.folder / reference)
        if len(steps) != len(expected):
            return [*figures, Figure("steps that are missing", float(len(expected) - len(steps)), 0)]
        difference = {version: 0.0 for version, _ in expected}
        for (_, loss), (version, wanted) in zip(steps, expected, strict=True):
            difference[version] = max(difference[version], abs(loss - wanted))
        first, *later = difference.values()
        later_at_most = tolerance if finds_the_same else None
        return [
            *figures,
            Figure("loss, largest difference before a swap", first, tolerance),
            Figure("after", max(later), later_at_most),
        ]

    return run


# Keys that ask for GPUs: left out where the CPU stands for them.
OF_GPUS = ("resources.train", "resources.score", "resources.index", "index.gpus_per_searcher")
ALL_ROLES = {"resources.train": "auto", "resources.score": "auto", "resources.index": "auto"}
FLOAT32 = {"train.precision": "float32", "lm.dtype": "float32", "index.dtype": "float32"}
BFLOAT16 = {"train.precision": "bf16_mixed", "lm.dtype": "bfloat16", "index.dtype": "bfloat16"}
RANKS = {"resources.train": 2, "lm.path": "stand_in", "lm.dtype": "auto"}  # the ranks take the GPUs; the LM needs none
IVF = {"index.kind": "IVF4,SQ8", "index.nprobe": 4, "index.gpus_per_searcher": 0.1}  # every list is looked into
CHECKS = {
    "lm_on_cpu": Check(lm_on_cpu, num_gpus=0),
    "lm_float32": Check(lm_float32, reference="lm_on_cpu"),
    "lm_bfloat16": Check(lm_bfloat16, reference="lm_on_cpu"),
    "lm_over_two_gpus": Check(lm_over_two_gpus, 2, "lm_on_cpu"),
    "lm_out_of_memory": Check(lm_out_of_memory, reference="lm_on_cpu"),
    "encoder_on_cpu": Check(encoder_on_cpu, num_gpus=0),
    "encoder_float32": Check(encoder_float32, reference="encoder_on_cpu"),
    "encoder_bfloat16": Check(encoder_bfloat16, reference="encoder_on_cpu"),
    "exact_search": Check(exact_search),
    # Two swaps while steps go on are in each of these.
    "train_on_cpu": Check(train_on_cpu, num_gpus=0),
    "train_float32": Check(trained("train_on_cpu", ALL_ROLES, 0.01), reference="train_on_cpu"),
    "train_bfloat16": Check(
        trained("train_on_cpu", {**ALL_ROLES, **BFLOAT16}, 0.1, finds_the_same=False), reference="train_on_cpu"
    ),
    "train_blue_green": Check(
        trained("train_on_cpu", {**ALL_ROLES, "index.swap": "blue_green"}, 0.01), reference="train_on_cpu"
    ),
    "train_ivf_on_gpu": Check(
        trained("train_on_cpu", {**ALL_ROLES, **IVF}, 0.05),
        reference="train_on_cpu",
        needs_faiss_gpu=True,
    ),
    "train_ranks_on_cpu": Check(train_ranks_on_cpu, num_gpus=0),
    "train_two_ranks": Check(trained("train_ranks_on_cpu", RANKS, 0.01), 2, "train_ranks_on_cpu"),
}


def _texts(num: int) -> list[tuple[str, str]]:
    """Prefix and continuation, of numpy's docstrings."""
    documents = [str(getattr(np, name).__doc__) for name in sorted(vars(np)) if callable(getattr(np, name))]
    long = [text for text in documents if len(text) > 800]
    assert len(long) >= num
    return [(text[:400], text[400:600]) for text in long[:num]]


def _logprobs(
    device: str, dtype: str, spread: bool = False, num_copies: int = 1, of_memory: float | None = None
) -> np.ndarray:
    """Mean log-prob of each continuation; with copies, of all of them in one pass, in a share of the GPU's memory."""
    import torch

    from replug import HuggingFaceLM
    from replug.models.hardware import DTYPES
    from replug.models.packaged import resolve_lm_path

    if of_memory is not None and device != "cpu":
        torch.cuda.set_per_process_memory_fraction(of_memory)
    in_one_pass = MANY_TOKENS if num_copies > 1 else None
    lm = HuggingFaceLM(resolve_lm_path("package:smollm2"), DTYPES[dtype], device, in_one_pass, spread=spread)
    # Copies differ in their beginning: equal inputs would be scored once.
    pairs = [(f"{copy} {prefix}", rest) for copy in range(num_copies) for prefix, rest in _texts(NUM_TEXTS)]
    scores = lm.score([prefix for prefix, _ in pairs], [rest for _, rest in pairs])
    return np.array([np.mean(score.token_logprobs) for score in scores[:NUM_TEXTS]])


def _against_cpu(place: Place, found: np.ndarray, tolerance: float) -> list[Figure]:
    expected = np.load(place.folder / "lm_on_cpu.npy")
    worst = float(np.abs(found - expected).max())
    return [Figure("nats a token, largest difference", worst, tolerance), *_memory()]


def _vectors(device: str, dtype: str) -> np.ndarray:
    from replug import Encoder
    from replug.models.hardware import DTYPES
    from replug.models.packaged import resolve_encoder_path

    encoder = Encoder(resolve_encoder_path("package:minilm")).to(device, DTYPES[dtype]).eval()
    return encoder.encode([prefix for prefix, _ in _texts(NUM_TEXTS)]).float().cpu().numpy()


def _cosines(place: Place, found: np.ndarray, tolerance: float) -> list[Figure]:
    expected = np.load(place.folder / "encoder_on_cpu.npy")
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return [Figure("1 - cosine, largest", float((1 - (found * expected).sum(1) / norms).max()), tolerance), *_memory()]


def _memory() -> list[Figure]:
    import torch

    if not torch.cuda.is_initialized():
        return []
    gpus = range(torch.cuda.device_count())
    return [Figure(f"GiB of GPU {gpu}", torch.cuda.max_memory_allocated(gpu) / 2**30) for gpu in gpus]


def _train(place: Place, name: str, overrides: Mapping[str, object], environment: Mapping[str, str]) -> list[Figure]:
    """A short run of the command line; it swaps the index twice, and ends with the evaluation."""
    keys = {
        **FLOAT32,
        "train.max_steps": STEPS,
        "train.batch_size": 4,
        "refresh.every_steps": 2,
        "refresh.lag_steps": 1,
        "retrieve.k": 4,
        "evaluate.k": 4,
        "evaluate.max_examples": 8,
        "evaluate.num_resamples": 200,
        "data.num_documents": 400,
        "data.num_queries": 100,
        "data.num_heldout": 20,
        "data.out": place.folder / "data",
        "run_dir": place.folder / name,
        **overrides,
    }
    config = "debug" if place.pretends else "quickstart"
    command = [sys.executable, "-m", "replug.commands.cli", "train", str(ROOT / f"configs/{config}.yaml")]
    start = time.monotonic()
    given = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    subprocess.run([*command, *given], check=True, cwd=ROOT, env={**os.environ, **environment})
    return [Figure("seconds of the run", time.monotonic() - start)]


def _steps(run: Path) -> list[tuple[int, float]]:
    """Of each step, the index version that it saw and its loss."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(int(row["index/version"]), row["train/loss"]) for row in rows if "train/loss" in row]


# One after the other ------------------------------------------------------------------------------------------


def run_checks(names: Sequence[str], place: Place, num_gpus: int, seconds: float = CHECK_SECONDS) -> list[Result]:
    """Each in a process of its own; a check whose reference failed, or that wants more than is here, is skipped."""
    results: dict[str, Result] = {}
    for name in names:
        why = _missing(CHECKS[name], num_gpus, results, place.pretends)
        results[name] = Result(name, "skipped", why=why) if why else _run_apart(name, place, seconds)
        print(_line(results[name]), flush=True)
    return list(results.values())


def _missing(check: Check, num_gpus: int, results: Mapping[str, Result], pretends: bool) -> str:
    if check.reference and results[check.reference].state != "passed":
        return f"{check.reference} did not pass"
    if check.num_gpus > num_gpus and not pretends:
        return f"{check.num_gpus} GPUs are needed, {num_gpus} are here"
    if check.needs_faiss_gpu and not pretends and not _has_faiss_gpu():
        return "faiss-gpu is not installed: make install FAISS=gpu"
    return ""


def _has_faiss_gpu() -> bool:
    import faiss
    import torch  # noqa: F401 - before faiss: of two CUDAs in one process the newer goes first

    return hasattr(faiss, "StandardGpuResources")


def _run_apart(name: str, place: Place, seconds: float) -> Result:
    outcome, log = place.folder / f"{name}.json", place.folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_smoke", "--check", name, "--out", str(place.folder)]
    start = time.monotonic()
    with log.open("w") as file:
        pretends = ["--pretend-cpu"] if place.pretends else []
        process = subprocess.Popen([*command, *pretends], stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
        state = _wait(process, seconds)
    took = time.monotonic() - start
    if state or not outcome.is_file():
        lines = log.read_text(errors="replace").splitlines()
        return Result(name, state or "failed", took, why="\n".join(lines[-15:]))
    figures = [Figure(**row) for row in json.loads(outcome.read_text())]
    return Result(name, "passed" if all(figure.is_well for figure in figures) else "failed", took, figures)


def _wait(process: subprocess.Popen, seconds: float) -> str:
    """Empty for an end in time. SIGTERM lets a run end its Ray; what does not end by it is killed."""
    try:
        return "" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        _end(process)
        return "timed out"
    except KeyboardInterrupt:
        _end(process)
        raise


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


# The report ---------------------------------------------------------------------------------------------------


def write_report(folder: Path, machine: Mapping[str, object], results: Sequence[Result]) -> None:
    write_json(folder / "report.json", {"machine": machine, "checks": [asdict(result) for result in results]})
    lines = ["# GPU smoke test", "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
    lines += ["| check | state | seconds | figures |", "|---|---|---|---|"]
    for one in results:
        said = "; ".join(_figure(figure) for figure in one.figures) or (one.why if one.state == "skipped" else "")
        lines.append(f"| {one.name} | {one.state} | {one.seconds:.0f} | {said} |")
    for one in results:
        if one.why and one.state != "skipped":
            lines += ["", f"## {one.name}: the end of its log", "", "```", one.why, "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def _figure(figure: Figure) -> str:
    allowed = f" (at most {figure.at_most:g})" if figure.at_most is not None else ""
    return f"{figure.name} {figure.value:.3g}{allowed}"


def _line(result: Result) -> str:
    said = "; ".join(map(_figure, result.figures)) or result.why.rpartition("\n")[2]
    return f"{result.state:<9} {result.name:<20} {result.seconds:4.0f} s  {said}"


def describe_gpus() -> dict[str, object]:
    """Processor, GPUs, driver and versions: what a report must say to be read elsewhere."""
    import torch

    from replug.train.run_dir import describe_environment

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    environment = describe_environment()
    return {
        "machine": describe_machine(torch.get_num_threads()),
        "GPUs": found.strip().replace("\n", "; ") or "none",
        "CUDA of torch": torch.version.cuda,
        "packages": environment["packages"],
        "commit": environment["git_commit"],
    }


def chosen_checks(only: Sequence[str]) -> list[str]:
    """In order, with the references that they are compared with."""
    if unknown := set(only) - set(CHECKS):
        sys.exit(f"--only: {', '.join(sorted(unknown))} is no check; expected some of {', '.join(CHECKS)}")
    wanted = {*only, *(CHECKS[name].reference for name in only)} if only else set(CHECKS)
    return [name for name in CHECKS if name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_smoke"))
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK")
    parser.add_argument("--pretend-cpu", action="store_true")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    place = Place(given.out.absolute(), given.pretend_cpu)
    if given.check:
        write_json(place.folder / f"{given.check}.json", [asdict(f) for f in CHECKS[given.check].run(place)])
        return 0
    import torch

    if not torch.cuda.is_available() and not place.pretends:
        print("no GPU that torch can use; see `replug doctor`. --pretend-cpu tries the script without one")
        return 2
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    results = run_checks(chosen_checks(given.only), place, torch.cuda.device_count())
    write_report(place.folder, describe_gpus(), results)
    print(f"report: {place.folder / 'report.md'}; please send it back with report.json")
    return int(any(result.state not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
