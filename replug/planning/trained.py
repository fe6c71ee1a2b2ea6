"""How much of a retriever learns: all of it, adapters alone (`lora`), or what is above frozen layers. Pure.

Adapters of a linear layer are rank * (in + out) weights. peft's own targets are taken for queries and values, which
they are in the architectures of BERT, Qwen and Gemma.
"""

from dataclasses import dataclass, replace

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.model_sizes import ModelSize

WEIGHT_BYTES, GRADIENT_BYTES = 4, 4  # in float32
LEARNING_BYTES = GRADIENT_BYTES + 8  # and Adam's two moments
_IN_ATTENTION = {
    **dict.fromkeys(("query", "q_proj", "q_lin", "q"), "q"),
    **dict.fromkeys(("key", "k_proj", "k_lin", "k", "value", "v_proj", "v_lin", "v"), "kv"),
}
_OTHERS = {
    **dict.fromkeys(("o_proj", "out_lin", "o"), "o"),
    **dict.fromkeys(("gate_proj", "up_proj", "lin1"), "up"),
    **dict.fromkeys(("down_proj", "lin2"), "down"),
    "dense": "o up down",
}
DEFAULT_TARGETS = ("query", "value")


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """Weights that a training rank holds, those of them that learn, and the share of the layers that these are in.

    `adapted_inputs` are the linear layers of a layer that keep their input for adapters, where adapters are in no
    others than those of queries, keys and values and drop nothing; None: every linear layer keeps its input.
    """

    parameters: int
    learning: int
    layers_share: float = 1.0
    adapted: bool = False  # adapters learn, the other weights do not
    adapted_inputs: int | None = None
    drops_out: bool = False  # whether steps have the encoder's own dropout
    side: TrainedSide = TrainedSide.both

    @property
    def num_bytes(self) -> int:
        """Of weights, gradients and moments."""
        return WEIGHT_BYTES * self.parameters + LEARNING_BYTES * self.learning

    @property
    def flop_factor(self) -> float:
        """FLOP of a step by those of a pass forward: backward as much again for inputs, and for own weights."""
        return 1 + self.layers_share * (1 if self.adapted else 2)


def whole(retriever: ModelSize) -> TrainedPart:
    """All weights learn."""
    return TrainedPart(retriever.parameters, retriever.parameters)


def trained_part(config: Config, retriever: ModelSize) -> TrainedPart:
    """Of a configuration. Raises UserError for more frozen layers than there are, and targets of unknown size."""
    frozen, lora = config.retriever.frozen_layers, config.lora
    if frozen and frozen >= retriever.layers:
        raise UserError(
            f"retriever.frozen_layers is {frozen}, but the retriever has {retriever.layers}; expected fewer"
        )
    layers = retriever.layers - frozen
    share = layers / retriever.layers
    part = TrainedPart(
        _held(config, retriever),
        round(retriever.layer_parameters * share) if frozen else retriever.parameters,
        share,
        drops_out=config.retriever.dropout,
        side=config.retriever.train,
    )
    if lora.rank is None:
        return part
    targets = lora.targets or DEFAULT_TARGETS
    adapters = layers * lora.rank * sum(_in_and_out(retriever, target) for target in targets)
    few = not lora.dropout and all(target in _IN_ATTENTION for target in targets)
    return replace(
        part,
        parameters=part.parameters + adapters,
        learning=adapters,
        adapted=True,
        adapted_inputs=len(targets) if few else None,
    )


def _held(config: Config, retriever: ModelSize) -> int:
    """Weights on a rank: beside one encoder that learns as that of queries stands the same one for documents."""
    is_copied = config.retriever.train is TrainedSide.query and config.retriever.query_path is None
    return retriever.parameters * (2 if is_copied else 1)


def _in_and_out(retriever: ModelSize, target: str) -> int:
    """Widths of what goes into a layer's linear layers of this name, and of what comes out, together."""
    width, inner = retriever.attention_width, retriever.intermediate
    sums = {
        "q": retriever.hidden + width,
        "kv": retriever.hidden + (retriever.kv_width or width),
        "o": width + retriever.hidden,
        "up": retriever.hidden + inner,
        "down": inner + retriever.hidden,
    }
    kinds = (_IN_ATTENTION | _OTHERS).get(target)
    if kinds is None:
        raise UserError(
            f"lora.targets: the plan does not know the size of {target}; expected some of "
            f"{', '.join(sorted(_IN_ATTENTION | _OTHERS))}"
        )
    return sum(sums[kind] for kind in kinds.split())
