"""The weights of a causal LM: loaded, and hashed once in a run, by whoever starts it, and compared by the rest.

A hash reads every byte, which for a 13B model is 26 GB. Replicas get it with the names, sizes and times of change of
the files it was made from. Who finds the same ones has the same weights; who does not, such as a node with a copy of
its own, reads them.
"""

import hashlib
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from replug.config.errors import UserError
from replug.models.model_files import load_whole, loading

log = logging.getLogger(__name__)

FLASH = "flash_attention_2"  # transformers' name
LARGE_BYTES = 10**9  # worth a line in the log


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes with a file's content, without reading it."""

    name: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class HashedFiles:
    """The hash of a folder's configuration, tokenizer and weights, and the files it was made from."""

    stamps: tuple[FileStamp, ...]
    digest: str


def hashed_files(path: str, known: HashedFiles | None = None) -> HashedFiles | None:
    """Of the files as they are now: `known` where they are those it was made from. None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    stamps = tuple(_stamp(file) for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]))
    return known if known is not None and known.stamps == stamps else HashedFiles(stamps, _digest(folder, stamps))


def lm_identity(path: str, dtype: torch.dtype, known: HashedFiles | None = None) -> str:
    """A local model's configuration, tokenizer and weights, with the dtype it runs in."""
    files = hashed_files(path, known)
    return f"{files.digest if files else path}:{str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=8)  # a process asks for an identity more than once
def _digest(folder: Path, stamps: tuple[FileStamp, ...]) -> str:
    num_bytes = sum(stamp.num_bytes for stamp in stamps)
    if num_bytes > LARGE_BYTES:
        log.info(f"hashing the {num_bytes / 1e9:.0f} GB of {folder}, so that its scores are known again")
    digest = hashlib.blake2b(digest_size=16)
    for stamp in stamps:
        with (folder / stamp.name).open("rb") as stream:
            digest.update(stamp.name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def _stamp(file: Path) -> FileStamp:
    status = file.stat()
    return FileStamp(file.name, status.st_size, status.st_mtime_ns)


def require_flash_attention(dtype: torch.dtype) -> None:
    """Raise UserError where transformers cannot use the package flash-attn."""
    if dtype == torch.float32 or not is_flash_attn_2_available():
        raise UserError(
            f"lm.attention is {FLASH}, which needs the package flash-attn, a GPU, and lm.dtype=bfloat16 or float16 "
            f"(found {str(dtype).removeprefix('torch.')}): pip install flash-attn, or leave lm.attention out"
        )


def load_causal_lm(path: str, dtype: torch.dtype, device_map: str | None, attention: str = "sdpa") -> PreTrainedModel:
    """The weights, on the CPU or over all visible GPUs. Raises UserError for what is no causal LM or has no room."""
    options: dict[str, Any] = {"dtype": dtype, "device_map": device_map}
    if attention == FLASH:
        require_flash_attention(dtype)
        options["attn_implementation"] = FLASH
    with loading("lm.path", path):
        model = load_whole(AutoModelForCausalLM, path, "lm.path", **options)
    if device_map is not None and torch.cuda.is_available():
        _require_on_gpus(model, path)
    return model


def _require_on_gpus(model: PreTrainedModel, path: str) -> None:
    """Raises UserError where layers were laid into host memory or onto disk, to be copied to a GPU in every pass."""
    places = {name: str(place) for name, place in getattr(model, "hf_device_map", {}).items()}
    outside = [name for name, place in places.items() if place in ("cpu", "disk")]
    if not outside:
        return
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
    raise UserError(
        f"lm.gpus_per_replica: the weights of {path} alone need {needed / 1e9:.1f} GB, and the {len(sizes)} GPUs of a "
        f"replica have {sum(sizes) / 1e9:.1f} GB, so {len(outside)} of its {len(places)} parts ({outside[0]}, ...) "
        "would lie elsewhere; expected all on GPUs: raise lm.gpus_per_replica, or take larger GPUs or a smaller LM"
    )
