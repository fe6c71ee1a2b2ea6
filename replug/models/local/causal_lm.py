"""A causal LM's weights in memory: on the CPU, or its layers laid over GPUs, all of them."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replug.config.errors import UserError
from replug.models.model_files import loading
from replug.models.whole_weights import load_whole


def load_causal_lm(path: str, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    """The weights, on the CPU or over all visible GPUs. Raises UserError for what is no causal LM or has no room."""
    with loading("lm.path", path):
        model = load_whole(AutoModelForCausalLM, path, "lm.path", dtype=dtype, device_map=device_map)
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
