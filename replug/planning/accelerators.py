"""Peak rates and memory of accelerators, the shares of the peaks that roles reach, and `--gpus 8xA100`.

Peaks are those of NVIDIA's and AMD's data sheets, dense: half of the figures "with sparsity". `auto` is float32 on a
type without bfloat16.
"""

import difflib
import re
from dataclasses import dataclass

from replug.config.errors import UserError
from replug.planning.memory import resolve_dtype

GPUS_PER_NODE = 8
# Shares of the dense peak, measured on one H200 (docs/gpu.md): GPT-2 XL scoring units of 8,192 tokens, BERT-base
# embedding texts of 130 tokens, and BERT-base with gradient, whose passes wait for the host.
REACHED = {"score": 0.49, "embed": 0.36, "train": 0.25}


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Peak FLOP/s by precision (0: not native), memory in GB, bytes/s of memory."""

    name: str
    bfloat16: float
    float16: float
    float32: float
    memory_gb: float
    bandwidth: float

    def resolve_dtype(self, name: str) -> str:
        """Return the precision that `auto` and `bf16_mixed` come to on this device."""
        return resolve_dtype(name, bool(self.bfloat16))

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a precision; without native support, that of float32."""
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
        _tera("H100-PCIe", 756, 756, 51, 80, 2000),
        _tera("H100-NVL", 835, 835, 60, 94, 3900),
        _tera("H200", 989, 989, 67, 141, 4800),
        _tera("H200-NVL", 835, 835, 60, 141, 4800),
        _tera("GH200", 990, 990, 67, 96, 4000),
        _tera("B200", 2250, 2250, 75, 180, 7700),
        _tera("B300", 2250, 2250, 75, 288, 8000),
        _tera("A10", 125, 125, 31.2, 24, 600),
        _tera("A10G", 70, 70, 35, 24, 600),
        _tera("A30", 165, 165, 10.3, 24, 933),
        _tera("A40", 149.7, 149.7, 37.4, 48, 696),
        _tera("A6000", 154.8, 154.8, 38.7, 48, 768),
        _tera("L4", 121, 121, 30.3, 24, 300),
        _tera("L40", 181, 181, 90.5, 48, 864),
        _tera("L40S", 362, 362, 91.6, 48, 864),
        _tera("V100", 0, 125, 15.7, 32, 900),
        _tera("V100-16GB", 0, 125, 15.7, 16, 900),
        _tera("T4", 0, 65, 8.1, 16, 300),
        _tera("RTX3090", 71, 71, 35.6, 24, 936),
        _tera("RTX4090", 165.2, 165.2, 82.6, 24, 1008),
        _tera("RTX5090", 209.5, 209.5, 104.8, 32, 1792),
        _tera("RTX6000-Ada", 364.2, 364.2, 91.1, 48, 960),
        _tera("RTX-PRO-6000", 503.8, 503.8, 125, 96, 1792),
        _tera("MI300X", 1307, 1307, 163.4, 192, 5300),
    )
}
# A card of another speed, or a part of one; SLURM's types have `_` for spaces, such as a100_3g.20gb.
OTHER = re.compile(r"(?<![a-z])(ti|super|laptop|max|d|mig|\d+g\.\d+gb)(?![a-z])")


def find_accelerator(name: str) -> DeviceModel | None:
    """Return the type of a name such as `h100` or `NVIDIA A100-SXM4-40GB`; None for one that is not in the table.

    The longest type whose words are all in the name, so that an A10G is no A10 and an H100 PCIe no other H100.
    """
    words = set() if OTHER.search(name.lower()) else _words(name)
    fitting = [known for known in ACCELERATORS if _words(known) <= words]
    return ACCELERATORS[max(fitting, key=lambda known: (len(_words(known)), len(known)))] if fitting else None


def _words(name: str) -> set[str]:
    """Return the runs of letters and of digits in a name."""
    return set(re.findall(r"[a-z]+|\d+", name.lower()))


@dataclass(frozen=True, slots=True)
class Devices:
    """So many of one accelerator over so many nodes. Roles reach shares of its peak; `efficiency` is one for all."""

    accelerator: DeviceModel
    count: int
    nodes: int
    efficiency: float | None = None

    def __str__(self) -> str:
        return f"{self.count}x{self.accelerator.name}"

    def rate(self, dtype: str, role: str) -> float:
        """Return the FLOP/s that one of them reaches in a configured precision: of `score`, `embed` or `train`."""
        return (self.efficiency or REACHED[role]) * self.accelerator.peak(self.accelerator.resolve_dtype(dtype))


def parse_devices(text: str | None, nodes: int | None = None, efficiency: float | None = None) -> Devices:
    """Read `8xA100` over `nodes` (default: eight GPUs to a node). Raises UserError, which names the flag."""
    if efficiency is not None and not 0 < efficiency <= 1:
        raise UserError(f"--efficiency is {efficiency:g}; expected a share of the peak above 0 and up to 1")
    if text is None:
        raise UserError("--gpus is missing; expected such as --gpus 8xA100")
    found = re.fullmatch(r"(\d+)\s*[x×*]\s*(\S.*)", text.strip())
    if not found or int(found.group(1)) == 0:
        raise UserError(f"--gpus is {text!r}; expected COUNTxTYPE with a count of 1 or more, such as 8xA100")
    count, name = int(found.group(1)), found.group(2)
    if (accelerator := find_accelerator(name)) is None:
        close = difflib.get_close_matches(name.upper(), ACCELERATORS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--gpus is {text!r}: {name!r} is unknown; expected one of {', '.join(ACCELERATORS)}{hint}")
    if nodes is None:
        nodes = 1 if count % GPUS_PER_NODE else count // GPUS_PER_NODE
    if nodes < 1 or count % nodes:
        raise UserError(f"--nodes is {nodes}; expected a divisor of the {count} devices of --gpus {text}")
    return Devices(accelerator, count, nodes, efficiency)
