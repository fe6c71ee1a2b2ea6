"""How local weights compute, as keys of `lm` say it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Computing:
    """`compile` is torch's. Without `fused` all layers are transformers' own operations.

    `packed` passes have no padding; None: on a GPU, where they can.
    """

    compile: bool = False
    fused: bool = True
    packed: bool | None = None


BY_DEFAULT = Computing()
