"""Which weights of the retriever learn: all, adapters alone (`lora`), or those above frozen layers; in checkpoints too.

What does not learn is in no checkpoint, which is small then: it holds the hash of those weights, and who goes on from
it has them from `retriever.path`.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from replug.config.errors import RunError, UserError
from replug.config.schema import Config
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.lora import adapter_settings, add_adapters, freeze_layers, frozen_part
from replug.train.sides import freeze_sides

UNTRAINED = "untrained_sha256"  # in a checkpoint that holds the weights alone that learn
PREFIX = "encoder."  # of the retriever's weights in a module's state


def check_training(config: Config, encoder: Encoder) -> None:
    """Raise UserError, before anything heavy starts, for what this encoder cannot be trained as."""
    for count in config.retriever.dims:
        if count > encoder.width:
            raise UserError(
                f"retriever.dims: {count} is more than the {encoder.width} numbers of the retriever's vectors"
            )
    for side in encoder.sides:
        if config.lora.rank is None:
            frozen_part(side.backbone, config.retriever.frozen_layers)
        else:
            adapter_settings(side.backbone, config.lora, config.retriever.frozen_layers)


def choose_trained_weights(config: Config, encoder: Encoder) -> None:
    """Leave a gradient to what learns, of the sides that are trained.

    The other weights are those that the retriever came with.
    """
    lora, frozen_layers = config.lora, config.retriever.frozen_layers
    backbones = [side.backbone for side in encoder.sides if any(w.requires_grad for w in side.backbone.parameters())]
    if lora.rank is not None:
        encoder.requires_grad_(False)
        for backbone in backbones:
            add_adapters(backbone, lora, frozen_layers, config.seed)
    elif frozen_layers:
        for backbone in backbones:
            freeze_layers(backbone, frozen_layers)
    else:
        return
    encoder.untrained_sha256 = _sha256({n: w for n, w in encoder.named_parameters() if not w.requires_grad})


def leave_out_untrained(encoder: Encoder, checkpoint: dict[str, Any]) -> None:
    """Of a checkpoint that is about to be written."""
    if encoder.untrained_sha256 is None:
        return
    trained = _trained_names(encoder)
    checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
    checkpoint[UNTRAINED] = encoder.untrained_sha256


def bring_back_untrained(encoder: Encoder, checkpoint: dict[str, Any]) -> None:
    """Complete a checkpoint that was read. Raises UserError where the retriever's own weights are others now."""
    if checkpoint.get(UNTRAINED) != encoder.untrained_sha256:
        raise UserError(
            "retriever.path: its weights are not those that the run was begun with, and the checkpoint holds those "
            "alone that learn: bring the first ones back, or give another run_dir"
        )
    if encoder.untrained_sha256 is None:
        return
    if (found := checkpoint["state_dict"].keys()) != (expected := _trained_names(encoder)):
        raise RunError(
            f"the checkpoint holds {len(found)} weights that learn, expected {len(expected)}: is it another run's?"
        )
    own = {PREFIX + name: value for name, value in encoder.state_dict().items()}
    checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}


def encoder_of_checkpoint(config: Config, checkpoint: Mapping[str, Any]) -> Encoder:
    """The retriever as a checkpoint has it, adapters beside its layers where they learn. Raises UserError as above."""
    encoder, whole = load_encoder(config.retriever), dict(checkpoint)
    freeze_sides(config.retriever.train, encoder)
    choose_trained_weights(config, encoder)
    bring_back_untrained(encoder, whole)
    encoder.load_state_dict({name.removeprefix(PREFIX): value for name, value in whole["state_dict"].items()})
    return encoder


def _trained_names(encoder: Encoder) -> set[str]:
    return {PREFIX + name for name, weight in encoder.named_parameters() if weight.requires_grad}


def _sha256(weights: Mapping[str, Tensor]) -> str:
    """Of names and numbers."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
