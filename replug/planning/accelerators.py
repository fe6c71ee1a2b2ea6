"""Peak rates and memory of GPUs, the shares of the peaks that roles reach, and `--gpus 8xA100`.

Peaks are from NVIDIA's data sheets, dense: half of the figures "with sparsity".
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.cluster.environment import allowed_cores
from replug.cluster.layout import Node
from replug.config.errors import UserError
from replug.planning.memory import resolve_dtype

GPUS_PER_NODE = 8
# Shares of the dense peak, measured on one H200 (docs/gpu.md): GPT-2 XL scoring units of 8,192 tokens, BERT-base
# embedding texts of 130 tokens, and BERT-base with gradient, limited by the host.
REACHED = {"score": 0.49, "embed": 0.36, "train": 0.25}
THIS_MACHINE, REACHED_HERE = "this machine", 0.6  # of matrix products, on processors
BFLOAT16, FLAGS = 3.0, ("avx512_bf16", "amx_bf16")  # speed-up on processors with one of these
SIZE, MANY, MEASURED_SECONDS = 64, 64, 0.5  # small matrices, multiplied by one core


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Peak TFLOP/s in 16 bits and in float32, memory in GB."""

    name: str
    half: float
    float32: float
    memory_gb: float
    has_bfloat16: bool = True

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a precision; without native bfloat16, that of float32."""
        is_half = dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16)
        return 1e12 * (self.half if is_half else self.float32)


ACCELERATORS = {
    model.name: model
    for model in (
        DeviceModel("A100", 312, 19.5, 80),
        DeviceModel("A100-40GB", 312, 19.5, 40),
        DeviceModel("H100", 989, 67, 80),
        DeviceModel("H100-PCIe", 756, 51, 80),
        DeviceModel("H200", 989, 67, 141),
        DeviceModel("A10", 125, 31.2, 24),
        DeviceModel("A10G", 70, 35, 24),
        DeviceModel("L40S", 362, 91.6, 48),
        DeviceModel("V100", 125, 15.7, 32, has_bfloat16=False),
        DeviceModel("V100-16GB", 125, 15.7, 16, has_bfloat16=False),
        DeviceModel("RTX4090", 165.2, 82.6, 24),
    )
}
# A card of another speed, or a part of one; SLURM's types have `_` for spaces, such as a100_3g.20gb.
OTHER = re.compile(r"(?<![a-z])(ti|super|laptop|max|d|nvl|mig|\d+g\.\d+gb)(?![a-z])")


def find_accelerator(name: str) -> DeviceModel | None:
    """Return the type of a name such as `h100` or `NVIDIA A100-SXM4-40GB`; None for an unknown type.

    The longest type with all words in the name wins, so that an A10G is not an A10, nor an H100 PCIe another H100.
    """

    def words(of: str) -> set[str]:
        return set(re.findall(r"[a-z]+|\d+", of.lower()))

    is_other = OTHER.search(name.lower())
    fitting = [known for known in ACCELERATORS if not is_other and words(known) <= words(name)]
    return ACCELERATORS[max(fitting, key=lambda known: len(words(known)))] if fitting else None


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of one type over several nodes, or the processors of this machine, which count as one device.

    On processors `model` is None and `core_rate` is the measured FLOP/s of all cores in float32.
    """

    model: DeviceModel | None
    has_bfloat16: bool  # with `auto`
    count: int = 1
    nodes: int = 1
    core_rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.count}x{self.model.name}" if self.model else THIS_MACHINE

    def rate(self, dtype: str, role: str) -> float:
        """Return the FLOP/s that one device reaches in a precision, in the role `score`, `embed` or `train`."""
        if self.model is None:
            is_fast = self.has_bfloat16 and resolve_dtype(dtype, True) == "bfloat16"
            return REACHED_HERE * self.core_rate * (BFLOAT16 if is_fast else 1.0)
        return REACHED[role] * self.model.peak(resolve_dtype(dtype, self.has_bfloat16))

    def as_nodes(self) -> list[Node]:
        """Return the nodes for the layout, each with enough processors; the command runs on the first."""
        gpus = self.count // self.nodes if self.model else 0
        gpu_bytes = 1e9 * self.model.memory_gb if self.model else None
        numbers = range(1, self.nodes + 1)
        return [Node(f"node {n}", float("inf"), gpus, gpu_bytes, is_driver=n == 1) for n in numbers]


def parse_devices(text: str | None, nodes: int | None = None) -> Devices:
    """Read `8xA100` over `nodes` (default: eight GPUs to a node); None is this machine.

    Raises UserError naming the flag.
    """
    if text is None:
        if nodes is not None:
            raise UserError(f"--nodes is {nodes}, but --gpus is missing; expected such as --gpus 8xA100")
        about = Path("/proc/cpuinfo").read_text()
        return Devices(None, any(flag in about for flag in FLAGS), core_rate=_machine_rate())
    match = re.fullmatch(r"(\d+)\s*[x×*]\s*(\S.*)", text.strip())
    if not match or int(match.group(1)) == 0:
        raise UserError(f"--gpus is {text!r}; expected COUNTxTYPE with a count of 1 or more, such as 8xA100")
    count, name = int(match.group(1)), match.group(2)
    if (model := find_accelerator(name)) is None:
        raise UserError(f"--gpus is {text!r}: {name!r} is unknown; expected one of {', '.join(ACCELERATORS)}")
    if nodes is None:
        nodes = 1 if count % GPUS_PER_NODE else count // GPUS_PER_NODE
    if nodes < 1 or count % nodes:
        raise UserError(f"--nodes is {nodes}; expected a divisor of the {count} devices of --gpus {text}")
    return Devices(model, model.has_bfloat16, count, nodes)


def _machine_rate() -> float:
    """Measure the FLOP/s of float32 products on one core, the best of half a second, times the cores."""
    matrices, seconds, begun = np.ones((MANY, SIZE, SIZE), np.float32), [float("inf")], time.perf_counter()
    while time.perf_counter() - begun < MEASURED_SECONDS:
        start = time.perf_counter()
        matrices @ matrices
        seconds.append(time.perf_counter() - start)
    return allowed_cores() * 2 * MANY * SIZE**3 / min(seconds)
