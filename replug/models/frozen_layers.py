"""The lower layers of an encoder left as they are: its embeddings and its first layers learn nothing.

What is frozen has neither gradient nor moments, and keeps no activations for the backward pass.
"""

from torch import nn
from transformers import PreTrainedModel

from replug.config.errors import UserError

KEY = "retriever.frozen_layers"


def freeze_layers(backbone: PreTrainedModel, count: int) -> None:
    """Freeze embeddings and the first `count` layers. Raises UserError as `frozen_part` does."""
    for module in frozen_part(backbone, count):
        module.requires_grad_(False)


def frozen_part(backbone: PreTrainedModel, count: int) -> list[nn.Module]:
    """What is frozen: the first `count` layers and all embeddings, none where `count` is 0.

    Raises UserError where the layers cannot be found, or are not so many that one is left.
    """
    if count == 0:
        return []
    name, layers = layers_of(backbone)
    if count >= len(layers):
        raise UserError(f"{KEY} is {count}, but {name} has {len(layers)} layers; expected fewer, so that some learn")
    tables = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    return [*_round_embeddings(backbone, name), *tables, *list(layers)[:count]]


def layers_of(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the layers, in the order in which a text goes through them. Raises UserError for none."""
    count = int(backbone.config.num_hidden_layers)
    lists = {name: part for name, part in backbone.named_modules() if isinstance(part, nn.ModuleList)}
    found = {name: part for name, part in lists.items() if len(part) == count and not _is_inside(name, lists)}
    if len(found) != 1:
        has = ", ".join(f"{name} of {len(part)}" for name, part in lists.items()) or "none"
        raise UserError(
            f"{KEY}: the layers of {type(backbone).__name__} cannot be told (expected one list of {count}, found "
            f"{has}); leave it out"
        )
    return next(iter(found.items()))


def _is_inside(name: str, lists: dict[str, nn.ModuleList]) -> bool:
    return any(name.startswith(f"{other}.") for other in lists)


def _round_embeddings(backbone: PreTrainedModel, layers: str) -> list[nn.Module]:
    """The part that holds the tokens' table with what belongs to it, such as its norm; where layers are not in it."""
    table = backbone.get_input_embeddings()
    return [
        part
        for name, part in backbone.named_children()
        if name != layers.partition(".")[0] and any(module is table for module in part.modules())
    ]
