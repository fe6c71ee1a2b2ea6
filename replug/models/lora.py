"""Adapters of an encoder: LoRA (Hu et al. 2021) by peft. Two thin matrices beside some linear layers learn.

    y = W x + alpha / rank * B (A x)        A [rank, in] is drawn, B [out, rank] begins at 0

The adapted model is the same object with other layers. Saved weights are `merged` ones, W + alpha / rank * B A, in the
architecture's own names, and the adapter lies beside them in peft's form.
"""

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from replug.config.errors import UserError, require_extra
from replug.config.schema import LoRAConfig
from replug.data.folder import write_checksums

if TYPE_CHECKING:
    from peft import LoraConfig
    from sentence_transformers import SentenceTransformer


ADAPTER = "adapter"  # the folder beside the merged weights; of a pair document_adapter and query_adapter
NAME = "default"  # peft's name of an adapter where there is one
INSIDE_PEFT = "base_model.model."  # where a PeftModel has the model that it wraps
POOLER = r"pooler\..*"  # no vector depends on it
SCALE = 2  # alpha / rank


def add_adapters(backbone: PreTrainedModel, lora: LoRAConfig, seed: int) -> None:
    """Put adapters beside the target layers; nothing else of the model learns then.

    The same seed draws the same A. Raises UserError as `adapter_settings` does.
    """
    settings = adapter_settings(backbone, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone.add_adapter(settings, adapter_name=NAME)


def adapter_settings(backbone: PreTrainedModel, lora: LoRAConfig) -> "LoraConfig":
    """Return peft's settings. Raises UserError where peft is missing or does not know the architecture."""
    assert lora.rank is not None
    require_extra("lora", "peft", what="lora.rank")
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    targets = DEFAULTS.get(kind := backbone.config.model_type)
    if not targets:
        raise UserError(f"lora.rank is set, but peft does not know which layers of {kind} to adapt; leave it out")
    return LoraConfig(
        r=lora.rank,
        lora_alpha=SCALE * lora.rank,
        target_modules=list(targets),
        exclude_modules=POOLER,
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=backbone.name_or_path,
    )


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def merged(model: "SentenceTransformer") -> "SentenceTransformer":
    """Return a copy with adapters in its own weights; the model itself if it has none.

    The weights that learn stay apart: to merge in place and to take apart again would change their last bits.
    """
    if not any(map(has_adapters, model.modules())):
        return model
    from peft.tuners.lora import LoraLayer

    whole = copy.deepcopy(model)
    layers: list[tuple[str, Any]] = [pair for pair in whole.named_modules() if isinstance(pair[1], LoraLayer)]
    for name, layer in layers:
        with torch.autocast(layer.weight.device.type, enabled=False):
            layer.merge()
        whole.set_submodule(name, layer.get_base_layer())
    adapted: list[Any] = [part for part in whole.modules() if has_adapters(part)]
    for part in adapted:
        del part.peft_config
        part._hf_peft_config_loaded = False  # it would save its adapters alone
    return whole


def save_adapters(backbones: Mapping[str, PreTrainedModel], folder: Path) -> None:
    """Write each model's adapter into a folder by its prefix, as `PeftModel.from_pretrained(base, ...)` reads it."""
    for prefix, backbone in backbones.items():
        if has_adapters(backbone):
            backbone.save_pretrained(folder / f"{prefix}{ADAPTER}")


def keep_adapters(source: Path, target: Path) -> None:
    """Copy the adapters of an encoder's folder, if it has any, to another one of the same weights."""
    adapters = [folder for folder in source.glob(f"*{ADAPTER}") if folder.is_dir()]
    for folder in adapters:
        shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)
    if adapters:
        write_checksums(target)
