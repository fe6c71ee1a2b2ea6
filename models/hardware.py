"""What the hardware multiplies natively, so that `dtype: auto` means one thing everywhere."""

import os

import torch

# Padded tokens in one forward pass of an LM, where nobody says otherwise. A CPU is busy with few, and few rows of
# similar length are padded little; a GPU wants many.
TOKENS_PER_PASS, TOKENS_PER_PASS_GPU = 1024, 32_768

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def multiplies_bfloat16() -> bool:
    """True where bfloat16 products run in hardware: recent NVIDIA GPUs, x86 with AVX512-BF16 or AMX, Arm with BF16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype for `auto`, `float32`, `bfloat16` or `float16`."""
    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return DTYPES[name]


def dtype_name(name: str) -> str:
    """As `resolve_dtype`, by name: float32, bfloat16 or float16."""
    return str(resolve_dtype(name)).removeprefix("torch.")


def available_cores() -> int:
    """Cores this process may use, which in a container or a SLURM step is fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
