"""What of an encoder learns: adapters alone, or all weights but those of its embeddings and first layers.

LoRA (Hu et al. 2021) by peft: an encoder stays as it is, and two thin matrices beside some linear layers learn.

    y = W x + alpha / rank * B (A x)        A [rank, in] is drawn, B [out, rank] begins at 0

The adapted model is the same object with other layers, so whatever encodes goes on. Whoever else is given weights gets
`merged` ones, W + alpha / rank * B A, in the architecture's own names, and the adapter beside them in peft's form.

Frozen layers have neither gradient nor moments, and keep no activations for the backward pass.
"""

import copy
import itertools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
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
POOLER = r"pooler\..*"
SCALE = 2  # alpha / rank


def add_adapters(backbone: PreTrainedModel, lora: LoRAConfig, frozen_layers: int, seed: int) -> None:
    """Put adapters beside the target layers above the frozen ones; nothing else of the model learns then.

    The same seed draws the same A. Raises UserError as `adapter_settings` does.
    """
    settings = adapter_settings(backbone, lora, frozen_layers)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, backbone, adapter_name=NAME)


def adapter_settings(backbone: PreTrainedModel, lora: LoRAConfig, frozen_layers: int) -> "LoraConfig":
    """Return peft's settings. Raises UserError where peft is missing or does not know the architecture."""
    assert lora.rank is not None
    frozen_part(backbone, frozen_layers)  # whether there are so many
    require_extra("lora", "peft", what="lora.rank")
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    targets = DEFAULTS.get(kind := backbone.config.model_type)
    if not targets:
        raise UserError(f"lora.rank is set, but peft does not know which layers of {kind} to adapt; leave it out")
    excluded = POOLER  # a regular expression of names: no vector depends on the pooler, and frozen layers do not learn
    if frozen_layers:
        frozen = "|".join(str(number) for number in range(frozen_layers))
        excluded = rf"{POOLER}|{re.escape(layers_of(backbone)[0])}\.({frozen})\..*"
    return LoraConfig(
        r=lora.rank,
        lora_alpha=SCALE * lora.rank,
        target_modules=list(targets),
        exclude_modules=excluded,
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=backbone.name_or_path,
    )


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def merged(model: "SentenceTransformer") -> "SentenceTransformer":
    """Return the model with adapters in its own weights, which it shares otherwise; itself if it has none.

    The weights that learn stay apart: to merge in place and to take apart again would change their last bits.
    """
    if not any(map(has_adapters, model.modules())):
        return model
    from peft.tuners.lora import LoraLayer

    shared = itertools.chain(model.parameters(), model.buffers())
    whole: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    layers: list[tuple[str, Any]] = [pair for pair in whole.named_modules() if isinstance(pair[1], LoraLayer)]
    for name, layer in layers:
        linear: Any = layer.get_base_layer()
        with torch.no_grad(), torch.autocast(linear.weight.device.type, enabled=False):
            weight = linear.weight + layer.get_delta_weight(NAME)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        whole.set_submodule(name, linear)
    for part in whole.modules():
        if has_adapters(part):
            del part.peft_config
    return whole


def save_adapters(backbones: Mapping[str, PreTrainedModel], folder: Path) -> None:
    """Write each model's adapter into a folder by its prefix, as `PeftModel.from_pretrained(base, ...)` reads it."""
    for prefix, backbone in backbones.items():
        if not has_adapters(backbone):
            continue
        from peft import get_peft_model_state_dict

        settings = copy.copy(backbone.peft_config[NAME])
        settings.inference_mode = True
        settings.save_pretrained(str(folder / f"{prefix}{ADAPTER}"))
        weights = get_peft_model_state_dict(backbone, adapter_name=NAME)
        inside = {INSIDE_PEFT + name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        save_file(inside, folder / f"{prefix}{ADAPTER}" / "adapter_model.safetensors")


def keep_adapters(source: Path, target: Path) -> None:
    """Copy the adapters of an encoder's folder, if it has any, to another one of the same weights."""
    found = [folder for folder in source.glob(f"*{ADAPTER}") if folder.is_dir()]
    for folder in found:
        shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)
    if found:
        write_checksums(target)


KEY = "retriever.frozen_layers"


def freeze_layers(backbone: PreTrainedModel, count: int) -> None:
    """Freeze embeddings and the first `count` layers. Raises UserError as `frozen_part` does."""
    for module in frozen_part(backbone, count):
        module.requires_grad_(False)


def frozen_part(backbone: PreTrainedModel, count: int) -> list[nn.Module]:
    """Return what is frozen: the first `count` layers and all embeddings, nothing if `count` is 0.

    Raises UserError where the layers cannot be found, or are not so many that one is left.
    """
    if count == 0:
        return []
    name, layers = layers_of(backbone)
    if count >= len(layers):
        raise UserError(f"{KEY} is {count}, but {name} has {len(layers)} layers; expected fewer, so that some learn")
    tables = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    table = backbone.get_input_embeddings()
    round_table = [  # with what belongs to it, such as its norm
        part
        for part_name, part in backbone.named_children()
        if part_name != name.partition(".")[0] and any(module is table for module in part.modules())
    ]
    return [*round_table, *tables, *list(layers)[:count]]


def layers_of(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return name and list of the layers, first to last. Raises UserError if they cannot be told."""
    count = int(backbone.config.num_hidden_layers)
    lists = {name: part for name, part in backbone.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = {name: lists[name] for name in outer if len(lists[name]) == count}
    if len(found) != 1:
        has = ", ".join(f"{name} of {len(part)}" for name, part in lists.items()) or "none"
        raise UserError(
            f"{KEY}: the layers of {type(backbone).__name__} cannot be told (expected one list of {count}, found "
            f"{has}); leave it out"
        )
    return next(iter(found.items()))
