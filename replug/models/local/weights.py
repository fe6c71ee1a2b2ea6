"""The weights of a causal LM: loaded, looked at, and hashed once in a run by the process that starts it.

Weights with another model's tokenizer, or with layers that were never trained, give finite scores like any other. But
to them a sentence is no likelier than its words in another order, which it is by nats a token to any LM that read its
language. An LM that looks ahead, as an encoder does, scores a text by what stands after it. `require_sense` asks.
"""

import hashlib
import logging
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replug.config.errors import UserError
from replug.models.black_box_lm import BlackBoxLM
from replug.models.model_files import load_whole, loading

log = logging.getLogger(__name__)

LARGE_BYTES = 10**9  # worth a line in the log


Stamp = tuple[str, int, int]  # name, bytes and time of change (ns) of a file: known without reading it


def lm_identity(path: str, dtype: torch.dtype) -> str:
    """Return the hash of a folder's configuration, tokenizer and weights, or a hub name, with the dtype."""
    folder, name = Path(path), path
    if folder.is_dir():
        files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
        stamps = tuple((file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files)
        name = _digest(folder, stamps)
    return f"{name}:{str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=8)  # a process asks for an identity more than once
def _digest(folder: Path, stamps: tuple[Stamp, ...]) -> str:
    num_bytes = sum(size for _, size, _ in stamps)
    if num_bytes > LARGE_BYTES:
        log.info(f"hashing the {num_bytes / 1e9:.0f} GB of {folder}, so that its scores are known again")
    digest = hashlib.blake2b(digest_size=16)
    for name, *_ in stamps:
        with (folder / name).open("rb") as stream:
            digest.update(name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def load_causal_lm(path: str, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    """Load weights onto the CPU or all visible GPUs. Raises UserError for other models and without room."""
    with loading("lm.path", path):
        model = load_whole(AutoModelForCausalLM, path, "lm.path", dtype=dtype, device_map=device_map)
    if device_map is not None and torch.cuda.is_available():
        _require_on_gpus(model, path)
    return model


def _require_on_gpus(model: PreTrainedModel, path: str) -> None:
    """Raise UserError if layers lie in host memory or on disk, to be copied to a GPU in every pass."""
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


ENGLISH = (
    "The keeper of the lighthouse painted seven wooden boats green before the storm came in from the sea.",
    "To bake bread you need flour and water and salt and a warm oven and a little patience.",
    "The committee met on Tuesday and agreed on a budget for the new school in the north of the city.",
)
OTHERS = (  # for LMs that read little or no English
    "El tren de la mañana llega a la estación a las ocho y sale otra vez a las nueve.",
    "Der Zug aus Hamburg kommt um acht Uhr an und fährt um neun Uhr wieder in den Norden ab.",
    "Le train du matin arrive à la gare à huit heures et repart vers le nord à neuf heures.",
    "Утренний поезд приходит на вокзал в восемь часов и снова уходит на север в девять часов.",
    "早上的火车八点钟到达车站，九点钟又开往北方的城市。",
    "朝の電車は八時に駅に着いて、九時にまた北の町へ出発します。",
    "for row in range(len(table)): for column in range(len(table[row])): total = total + table[row][column]",
)
# Nats a token that order is worth. LMs of 135M parameters gain 1.5 to 4.4; other models' tokenizers give -0.8 to 0.5.
LEAST_GAIN, LEAST_GAIN_OF_ONE = 0.5, 1.0
LEAST_OTHERS = 2
TOLERANCE_NATS = 0.15  # of a token's log-prob, which bfloat16 moves where a batch has other texts


def require_sense(lm: BlackBoxLM, path: str) -> None:
    """Raise UserError for an LM to which order means nothing, or which looks ahead. Asks it for a dozen short texts."""
    half = " ".join(ENGLISH[0].split()[:9])  # no longer a text than those above, for LMs that hold few tokens
    short, long = lm.score([""] * 2, [half, ENGLISH[0]])
    known = min(short.num_tokens, long.num_tokens)
    moved = np.abs(short.token_logprobs[:known] - long.token_logprobs[:known])
    if np.mean(moved) > TOLERANCE_NATS:
        raise UserError(f"lm.path: {path} scores a text by what stands after it; expected a causal LM, not an encoder")
    gains = order_gains(lm, ENGLISH)
    if np.mean(gains) >= LEAST_GAIN:
        return
    others = order_gains(lm, OTHERS)
    if sum(gain >= LEAST_GAIN_OF_ONE for gain in others) >= LEAST_OTHERS:
        return
    raise UserError(
        f"lm.path: {path} makes no sense of language: a sentence is only {np.mean(gains):.2f} nats a token likelier "
        f"than its words in another order, expected {LEAST_GAIN:g}; are the tokenizer and the weights of one model, "
        "and were the weights trained?"
    )


def order_gains(lm: BlackBoxLM, texts: Sequence[str]) -> list[float]:
    """Return the nats a token by which each text is likelier than its words in another order."""
    scores = lm.score([""] * 2 * len(texts), [*texts, *map(shuffled, texts)])
    means = [score.sum_logprob / score.num_tokens for score in scores]
    return [means[row] - means[row + len(texts)] for row in range(len(texts))]


def shuffled(text: str) -> str:
    """Return a text's words in another order, the same each time; its characters if it has no spaces."""
    words = text.split()
    parts, space = (words, " ") if len(words) > 3 else (list(text), "")
    return space.join(random.Random(0).sample(parts, len(parts)))
