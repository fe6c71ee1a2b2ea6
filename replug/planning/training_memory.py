"""Bytes that a step of training holds on a GPU. Pure.

Counted by tensor in the layers of transformers' BERT and Qwen3 with fused attention, and compared with what a step
on fake tensors holds (tests/planning/test_training_memory.py). Under autocast norms and sums stay in float32, and each
linear layer keeps a copy of its input of its own in 16 bits.
"""

from dataclasses import dataclass

from replug.config.choices import TrainedSide
from replug.planning.memory import DTYPE_BYTES
from replug.planning.model_sizes import ModelSize
from replug.planning.trained import GRADIENT_BYTES, TrainedPart, whole
from replug.planning.workload import Shape

TOKENS_PER_PASS = 8192  # of a pass with gradient where no key says otherwise (models/encoder.py)
ROW_BYTES = 4  # of a unit of width in what goes into a layer, which is float32 under autocast too
PASSING_BYTES = 20  # that a pass has in hand in its last layer and does not keep, for each token and unit of width
UNCOUNTED = 1.003  # biases and norms, which a ModelSize leaves out


def train_bytes(
    retriever: ModelSize, shape: Shape, ranks: int, dtype: str, checkpointed: bool, trained: TrainedPart | None = None
) -> float:
    """Of one rank, which takes its share of the batch's queries with their documents, in so many parts.

    Activations are of one chunk where chunks are asked for, a text at least; beside them all vectors are kept, which
    are little. `trained` is what of the retriever learns, None: all.
    """
    return _Step(retriever, shape, ranks, dtype, checkpointed, trained or whole(retriever)).num_bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """Of one rank."""

    retriever: ModelSize
    shape: Shape
    ranks: int
    dtype: str
    checkpointed: bool
    part: TrainedPart

    @property
    def num_bytes(self) -> float:
        """The most at a time: after the forward pass, where layers are computed again, or while weights change.

        Adam then has as much in hand as the weights that learn.
        """
        in_pass = max(self._forward, self._again) if self.checkpointed else self._forward
        sums = self._gradients if self.ranks > 1 else 0.0  # DDP's own
        return UNCOUNTED * (self.part.num_bytes + sums) + max(self._gradients, self._kept + self._waiting + in_pass)

    @property
    def _forward(self) -> float:
        """Autocast copies weights once in a step where they learn, once in each pass where they do not."""
        if self.checkpointed or self._is_chunked or not self.part.adapted:
            num_copies = float(not (self.checkpointed and self.part.adapted))
        else:
            num_copies = sum(-(-tokens // self._pass_tokens) for tokens in self._tokens)
        return num_copies * self._copied + self._passing

    @property
    def _again(self) -> float:
        """While a layer of a pass is computed again. The gradients are not there yet, unless of an earlier part."""
        layer = layer_bytes(self.retriever, self.dtype, self.shape.lengths.longest, self.part)
        layer += (8 * DTYPE_BYTES[self.dtype] + 12 * self.part.adapted) * self.retriever.hidden  # in hand, not kept
        there = self._is_chunked or self.shape.step.micro_batches > 1
        in_pass = layer * min(self._pass_tokens, max(self._tokens))
        return in_pass + self._copied / self.retriever.layers - (0.0 if there else self._gradients)

    @property
    def _kept(self) -> float:
        one_token = token_bytes(
            self.retriever, self.dtype, self.shape.lengths.longest, self.part, checkpointed=self.checkpointed
        )
        return one_token * (min(self._pass_tokens, max(self._tokens)) if self._is_chunked else sum(self._tokens))

    @property
    def _waiting(self) -> float:
        """Between chunks gradients wait in 16 bits: beside those of earlier parts, or in place of float32."""
        if not self._is_chunked or self.part.adapted:
            return 0.0
        return self._copied * (1 if self.shape.step.micro_batches > 1 else -1)

    @property
    def _passing(self) -> float:
        """In the last pass of documents, or the largest where they have no gradient, and no layer keeps anything."""
        retriever, last = self.retriever, min(self._pass_tokens, self._of_documents)
        if self.part.side is TrainedSide.query:
            inner = 16 * retriever.hidden + 2 * DTYPE_BYTES[self.dtype] * retriever.intermediate
            return max(inner, 28 * retriever.hidden) * last  # attention may have more in hand
        if not self._is_chunked:
            last = self._of_documents % self._pass_tokens or last
        one_token = PASSING_BYTES * retriever.hidden
        if self.checkpointed:
            one_token += 2 * retriever.intermediate
        elif self.part.adapted:
            one_token = (16 + 6 * DTYPE_BYTES[self.dtype]) * retriever.hidden
        return one_token * last

    @property
    def _tokens(self) -> tuple[float, ...]:
        """That a rank encodes with gradient at a time, of queries and of documents, as far as they learn."""
        both = {TrainedSide.query: (self._of_queries,), TrainedSide.documents: (self._of_documents,)}
        return both.get(self.part.side, (self._of_queries, self._of_documents))

    @property
    def _of_queries(self) -> float:
        step = self.shape.step
        return step.batch_size / (self.ranks * step.micro_batches) * self.shape.lengths.context

    @property
    def _of_documents(self) -> float:
        lengths = self.shape.lengths
        return self._of_queries / lengths.context * self.shape.step.k * lengths.document

    @property
    def _pass_tokens(self) -> float:
        return max(self.shape.step.chunk_tokens or TOKENS_PER_PASS, self.shape.lengths.longest)

    @property
    def _is_chunked(self) -> bool:
        return self.shape.step.chunk_tokens is not None

    @property
    def _gradients(self) -> float:
        return float(GRADIENT_BYTES * self.part.learning)

    @property
    def _copied(self) -> float:
        """Of the weights of trained layers in 16 bits."""
        if self.dtype == "float32":
            return 0.0
        return DTYPE_BYTES[self.dtype] * self.retriever.layer_parameters * self.part.layers_share


def layer_bytes(model: ModelSize, dtype: str, length: int, part: TrainedPart) -> float:
    """That one layer keeps of a token, in texts of so many tokens, for the backward pass."""
    width, keys, size = model.attention_width, model.kv_width or model.attention_width, DTYPE_BYTES[dtype]
    fused = width / 16 + size * length  # sums of the softmax in float32, for heads of 64; the mask of padding
    if model.gated:
        attention, norms = (4 + 5 * size) * width + (4 + size) * keys, 27 * model.hidden
        return fused + attention + norms + 4 * size * model.intermediate
    attention, norms = 2 * size * (width + keys), 8 * model.hidden + 16
    if part.adapted_inputs is not None:
        inputs = part.adapted_inputs if size == 2 else 1
        return fused + attention + norms + size * (inputs * model.hidden + model.intermediate)
    inputs = 8 + 4 * part.adapted + 2 * part.drops_out
    return fused + attention + norms + inputs * model.hidden + 2 * size * model.intermediate


def token_bytes(model: ModelSize, dtype: str, length: int, part: TrainedPart, checkpointed: bool) -> float:
    """That all layers keep of a token, or with gradient checkpointing their inputs, and the embeddings below them."""
    layers, row = model.layers * part.layers_share, ROW_BYTES * model.hidden
    if checkpointed:
        return row * (model.layers + (2 if part.adapted else 1)) + length
    has_embeddings = part.layers_share == 1 and not part.adapted
    embeddings = (row + part.drops_out * model.hidden) * has_embeddings
    return layers * layer_bytes(model, dtype, length, part) + embeddings + length
