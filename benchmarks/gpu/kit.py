"""Figures of a stage, and how they are measured: seconds with the device waited for, memory, and stops of the host."""

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

PEAK_FLOPS = 989e12  # of bfloat16 products by an H100's data sheet


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a stage; `at_most` and `at_least` are what is asked of it."""

    stage: str
    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_as_asked(self) -> bool:
        above = self.at_most is not None and not float(self.value) <= self.at_most  # `nan` is never as asked
        below = self.at_least is not None and not float(self.value) >= self.at_least
        return not above and not below

    @property
    def asked(self) -> str:
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{words} {bound:.4g}" for words, bound in bounds if bound is not None)

    @property
    def shown(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return f"{value} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Kit:
    """Writes the figures of a stage. With `pretends` the CPU stands for the GPU, at small sizes."""

    stage: str
    folder: Path
    pretends: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.pretends else "cuda:0")

    def say(
        self,
        name: str,
        value: float | str,
        unit: str = "",
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Print a figure and add it to `figures.jsonl`, so that a stage that is cut has told what it found."""
        figure = Figure(self.stage, name, value, unit, at_most, at_least)
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")
        asked = f"   <-- asked: {figure.asked}" if not figure.is_as_asked else ""
        print(f"{self.stage:9} {name:64} {figure.shown}{asked}", flush=True)

    def on_gpu(self, bound: float) -> float | None:
        """Return a bound that holds for GPUs alone."""
        return None if self.pretends else bound

    def seconds(self, run: Callable[[], object], rounds: int = 5, warm: int = 2) -> float:
        """Return the median seconds of a run, the device waited for."""
        rounds, warm = (1, 0) if self.pretends else (rounds, warm)
        for _ in range(warm):
            run()
        self.wait()
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def wait(self) -> None:
        """Wait for the device."""
        if not self.pretends:
            torch.cuda.synchronize()

    def stops(self, run: Callable[[], object]) -> int:
        """Return how often the host waits for the device in a run, by torch's own count; 0 on a CPU."""
        if self.pretends:
            run()
            return 0
        self.wait()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
        torch.cuda.set_sync_debug_mode("default")
        places = {f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)}
        if places:
            print(f"{self.stage:9} stopped at {', '.join(sorted(places))}", flush=True)
        return sum("synchroniz" in str(one.message) for one in seen)

    def begin_memory(self) -> None:
        """Forget what was allocated at most so far."""
        if not self.pretends:
            gc.collect()  # modules and their trainer know each other
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def say_memory(self, name: str, planned: float, at_least: float = 0.9, at_most: float = 1.4) -> None:
        """Say planned bytes over the most that torch allocated since `begin_memory`."""
        if not self.pretends:
            peak = torch.cuda.max_memory_allocated()
            self.say(f"{name}: planned / allocated", planned / peak, f"of {peak / 1e9:.2f} GB", at_most, at_least)

    def flops_of_product(self, m: int, k: int, n: int) -> float:
        """Return the FLOP/s of a bfloat16 product [M, K] x [K, N]."""
        a = torch.randn(m, k, device=self.device, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=self.device, dtype=torch.bfloat16)
        return 2 * m * k * n / self.seconds(lambda: a @ b, 20, 5)
