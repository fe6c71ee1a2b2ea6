"""What stands behind an encoder's backbone: pooling over the tokens, then layers over the vector.

The forms are those of sentence-transformers, whose vectors these are to 1e-5. Everything here is computed in float32,
under autocast and with weights in bfloat16 too: it is a product of a vector, which costs nothing beside the backbone.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

MEAN, CLS = "mean", "cls"  # over all tokens (Contriever), or of the first alone (DPR, BGE)
LAST = "lasttoken"  # of the last token, which has seen all others in a model that reads from left to right
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of hidden states [B, T, D] over the positions where the mask [B, T] is 1: [B, D]."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _mean_sqrt_len(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1).sqrt()


def _weighted_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """A token weighs its position from 1: later ones have read more (SGPT, Muennighoff 2022)."""
    positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    weights = (mask.to(hidden.dtype) * positions).unsqueeze(-1)  # [B, T, 1]
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.to(torch.int).argmax(1)]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    from_the_end = mask.to(torch.int).flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), hidden.shape[1] - 1 - from_the_end]


# In the order in which sentence-transformers' older files, which have a flag for each, put them side by side.
POOLERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    CLS: _first,
    "max": _max,
    MEAN: mean_pool,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    LAST: _last,
}


class Pooling(nn.Module):
    """One vector of hidden states, or several side by side. `include_prompt` is whether a prompt's tokens count."""

    def __init__(self, modes: Sequence[str], width: int, include_prompt: bool = True) -> None:
        super().__init__()
        self.modes, self.width, self.include_prompt = tuple(modes), width, include_prompt

    @property
    def dim(self) -> int:
        return len(self.modes) * self.width

    def forward(self, hidden: Tensor, mask: Tensor, prompt_tokens: int = 0) -> Tensor:
        """[B, modes * D] of hidden states [B, T, D] and a mask [B, T] of rows that are padded on the right."""
        if prompt_tokens and not self.include_prompt:
            mask = mask.clone()
            mask[:, :prompt_tokens] = 0
        return torch.cat([POOLERS[mode](hidden, mask) for mode in self.modes], dim=-1)

    def describe(self) -> str:
        return "+".join(self.modes) + ("" if self.include_prompt else " without the prompt")


class VectorLayer(nn.Module):
    """A layer over vectors [B, D], as `modules.json` lists it."""

    kind: ClassVar[str]  # the class of sentence-transformers, and the end of its folder's name

    def out_dim(self, dim: int) -> int:
        """Numbers of a vector behind it, of `dim` before."""
        return dim

    def settings(self) -> dict[str, object]:
        """What its config.json says."""
        return {}

    def describe(self) -> str:
        return self.kind


class Dense(VectorLayer):
    """A linear layer and its activation, one of ACTIVATIONS."""

    kind = "Dense"

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation, self._name = ACTIVATIONS[activation](), activation

    def forward(self, vectors: Tensor) -> Tensor:
        bias = None if self.linear.bias is None else self.linear.bias.float()
        return self.activation(nn.functional.linear(vectors, self.linear.weight.float(), bias))

    def out_dim(self, dim: int) -> int:
        return self.linear.out_features

    def settings(self) -> dict[str, object]:
        activation = type(self.activation)
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
        }

    def describe(self) -> str:
        return f"Dense({self.linear.out_features}, {self._name})"


class LayerNorm(VectorLayer):
    """Layer normalization with its own weights."""

    kind = "LayerNorm"

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dimension)

    def forward(self, vectors: Tensor) -> Tensor:
        norm = self.norm
        return nn.functional.layer_norm(
            vectors, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
        )

    def settings(self) -> dict[str, object]:
        return {"dimension": self.norm.normalized_shape[0]}


class Normalize(VectorLayer):
    """Unit vectors."""

    kind = "Normalize"

    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1)


class EncoderHead(nn.Module):
    """From hidden states to vectors: pooling, then each layer in turn."""

    def __init__(self, pooling: Pooling, layers: Sequence[VectorLayer] = ()) -> None:
        super().__init__()
        self.pooling, self._layers = pooling, nn.ModuleList(layers)

    @property
    def layers(self) -> list[VectorLayer]:
        return [cast(VectorLayer, layer) for layer in self._layers]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        dim = self.pooling.dim
        for layer in self.layers:
            dim = layer.out_dim(dim)
        return dim

    @property
    def ends_normalized(self) -> bool:
        return bool(self.layers) and isinstance(self.layers[-1], Normalize)

    def leave_out_normalize(self) -> None:
        """At the end."""
        if self.ends_normalized:
            self._layers = self._layers[:-1]

    def forward(self, hidden: Tensor, mask: Tensor, prompt_tokens: int = 0) -> Tensor:
        """Vectors [B, D] in float32 of hidden states [B, T, D], a mask [B, T], and how many tokens a prompt has."""
        with torch.autocast(hidden.device.type, enabled=False):
            vectors: Tensor = self.pooling(hidden.float(), mask, prompt_tokens)
            for layer in self.layers:
                vectors = layer(vectors)
        return vectors

    def describe(self, implied: bool = False) -> str:
        """The chain in words, by which an index knows it; the weights have a hash of their own.

        A Normalize at the end is left out where it is `implied`.
        """
        layers = self.layers[:-1] if implied and self.ends_normalized else self.layers
        return ", ".join([self.pooling.describe(), *(layer.describe() for layer in layers)])
