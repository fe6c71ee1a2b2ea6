"""What a figure was measured on."""

import os
import platform
from pathlib import Path

import torch

from replug.models.hardware import available_cores, multiplies_bfloat16


def describe_machine(threads: int) -> str:
    """One line: processor, cores, threads used, torch, and whether bfloat16 runs in hardware."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in cpuinfo if "model name" in line]
    bf16 = "bfloat16 in hardware" if multiplies_bfloat16() else "no bfloat16 in hardware"
    load = os.getloadavg()[0]
    return (
        f"{names[0] if names else platform.processor()}, {available_cores()} cores, {threads} threads, "
        f"torch {torch.__version__}, {bf16}, load {load:.1f} at the start"
    )
