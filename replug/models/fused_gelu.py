"""The tanh form of GELU (Hendrycks & Gimpel 2016) in torch's one kernel, in place of transformers' eight.

GPT-2, GPT-J, GPT-Neo, Phi, Bloom, ALBERT and T5's gated layers write the formula out. Each operation of it reads and
writes the widest tensor of a layer, and training keeps most of them for the backward pass. The kernel computes the
same formula in one pass, in float32 within, so half-precision models are rounded once where they were rounded at
every operation.
"""

from torch import nn
from transformers.activations import AccurateGELUActivation, FastGELUActivation, GELUTanh, NewGELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu

# Ways to write 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); some round sqrt(2 / pi) to eight digits.
WRITTEN_OUT = (NewGELUActivation, FastGELUActivation, AccurateGELUActivation, GELUTanh, BloomGelu)


def use_fused_gelu(model: nn.Module) -> int:
    """Replace the activations of a model that write the formula out; returns how many. Weights stay as they are."""
    written_out = [
        (module, name)
        for module in model.modules()
        for name, part in module.named_children()
        if type(part) in WRITTEN_OUT
    ]
    for module, name in written_out:
        setattr(module, name, nn.GELU("tanh"))
    return len(written_out)
