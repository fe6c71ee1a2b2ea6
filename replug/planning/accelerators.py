"""Accelerators by name: peak rates and memory, and what `--gpus 8xA100` means.

Peaks are the manufacturers' dense figures. A type without bfloat16 runs what `auto` decides in float32, as
`models.hardware.resolve_dtype` has it.
"""

import difflib
import re
from dataclasses import dataclass, replace

from replug.config.errors import UserError

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Peak FLOP/s by precision (0: not native), memory in GB (0: the host's own, not checked), bytes/s of memory."""

    name: str
    bfloat16: float
    float16: float
    float32: float
    memory_gb: float
    bandwidth: float
    efficiency: float = 0.35  # share of the peak that long passes of transformers reach (docs/planning.md)

    @property
    def is_cpu(self) -> bool:
        return self.memory_gb == 0

    def resolve_dtype(self, name: str) -> str:
        """The precision that `auto` and `bf16_mixed` come to on this device."""
        if name == "auto":
            return "bfloat16" if self.bfloat16 else "float32"
        return "bfloat16" if name == "bf16_mixed" else name

    def peak(self, dtype: str) -> float:
        """FLOP/s; a precision that is not native is emulated in float32."""
        native: float = getattr(self, dtype)
        return native or self.float32


def _tera(name: str, bfloat16: float, float16: float, float32: float, memory_gb: float, gb_s: float) -> DeviceModel:
    return DeviceModel(name, bfloat16 * 1e12, float16 * 1e12, float32 * 1e12, memory_gb, gb_s * 1e9)


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        _tera("A100", 312, 312, 19.5, 80, 2039),
        _tera("A100-40GB", 312, 312, 19.5, 40, 1555),
        _tera("H100", 989, 989, 67, 80, 3350),
        _tera("H200", 989, 989, 67, 141, 4800),
        _tera("B200", 2250, 2250, 75, 180, 7700),
        _tera("A10", 125, 125, 31.2, 24, 600),
        _tera("A6000", 154.8, 154.8, 38.7, 48, 768),
        _tera("L4", 121, 121, 30.3, 24, 300),
        _tera("L40S", 362, 362, 91.6, 48, 864),
        _tera("V100", 0, 125, 15.7, 32, 900),
        _tera("V100-16GB", 0, 125, 15.7, 16, 900),
        _tera("T4", 0, 65, 8.1, 16, 300),
        _tera("RTX3090", 71, 71, 35.6, 24, 936),
        _tera("RTX4090", 165.2, 165.2, 82.6, 24, 1008),
        _tera("RTX5090", 209.5, 209.5, 104.8, 32, 1792),
        _tera("MI300X", 1307, 1307, 163.4, 192, 5300),
        # One core: two float32 products of 16 lanes a cycle at 2.2 GHz; half of it is what docs/benchmarks.md measured.
        DeviceModel("cpu", 0, 0, 1.4e11, 0, 1e10, efficiency=0.5),
    )
}


@dataclass(frozen=True, slots=True)
class Devices:
    """So many of one accelerator over so many nodes; of `cpu`, cores."""

    accelerator: DeviceModel
    count: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.count}x{self.accelerator.name}"


def parse_devices(text: str, nodes: int | None = None) -> Devices:
    """`8xA100` over `nodes` (default: eight GPUs to a node). Raises UserError, which names the flag."""
    found = re.fullmatch(r"(\d+)\s*[x×*]\s*(\S+)", text.strip())
    if not found or int(found.group(1)) == 0:
        raise UserError(f"--gpus is {text!r}; expected COUNTxTYPE with a count of 1 or more, such as 8xA100 or 16xcpu")
    count, accelerator = int(found.group(1)), _device_model(text, found.group(2))
    if nodes is None:
        nodes = 1 if accelerator.is_cpu or count % GPUS_PER_NODE else count // GPUS_PER_NODE
    if nodes < 1 or count % nodes:
        raise UserError(f"--nodes is {nodes}; expected a divisor of the {count} devices of --gpus {text}")
    return Devices(accelerator, count, nodes)


def accelerator_named(name: str, memory_gb: float) -> DeviceModel:
    """The one that a driver calls so, as `NVIDIA A100-SXM4-80GB`, with the memory that it has.

    Of a name without an entry, an H100's rates: what roles take stands to one another nearly alike on all GPUs.
    """
    written = name.replace(" ", "").lower()
    known = [one for key, one in ACCELERATORS.items() if not one.is_cpu and key.partition("-")[0].lower() in written]
    found = max(known, key=lambda one: len(one.name.partition("-")[0]), default=ACCELERATORS["H100"])
    return replace(found, memory_gb=memory_gb)


def check_efficiency(share: float | None) -> None:
    """Raises UserError, which names the flag, for what is no share of the peak; None is what is usual."""
    if share is not None and not 0 < share <= 1:
        raise UserError(f"--efficiency is {share:g}; expected a share of the peak above 0 and up to 1")


def _device_model(text: str, name: str) -> DeviceModel:
    by_name = {known.lower(): accelerator for known, accelerator in ACCELERATORS.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    close = difflib.get_close_matches(name.lower(), by_name, n=1)
    hint = f"; did you mean {by_name[close[0]].name}?" if close else ""
    raise UserError(f"--gpus is {text!r}: {name!r} is unknown; expected one of {', '.join(ACCELERATORS)}{hint}")
