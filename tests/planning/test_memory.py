"""The plan's memory of training, beside what a step of the module holds on fake tensors."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config, LoRAConfig
from replug.models.batching import ENCODER_TOKENS_WITH_GRADIENT
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from replug.planning.memory import layer_bytes, train_bytes, trained_part, whole
from replug.planning.model_sizes import ModelSize, encoder_size, transformer
from replug.planning.pace import job_of
from replug.planning.workload import shape_of
from replug.train.module import LSRModule
from replug.train.trained_weights import choose_trained_weights
from tests.support.training import made_module

BLOCK = 512  # bytes that torch's caching allocator rounds to
ATEN = torch.ops.aten


class PeakBytes(TorchDispatchMode):
    """Bytes of storages that are alive, and the most that were."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = -(-storage.nbytes() // BLOCK) * BLOCK
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.held -= num_bytes


def _attention_of_a_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attn_mask is None and query.dtype is not torch.float32:
        return ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    keeps = query.requires_grad
    return ATEN._scaled_dot_product_efficient_attention(query, key, value, bias, keeps, dropout_p, is_causal)[0]


def _dropout_of_a_gpu(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A CPU keeps as many numbers as there are values, a GPU a byte of each."""
    return ATEN.native_dropout(values, p, True)[0] if training and p else values


def _with_a_mask(of_real: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def pad(self: Encoder, ids: Sequence[np.ndarray], task: str) -> tuple[Tensor, Tensor]:
        inputs, mask = of_real(self, ids, task)
        return inputs, torch.ones_like(inputs) if mask is None else mask

    return pad


@contextmanager
def gpu_memory() -> Iterator[PeakBytes]:
    """Of all tensors that are made within."""
    with (
        FakeTensorMode(),
        patch.object(nn.functional, "scaled_dot_product_attention", _attention_of_a_gpu),
        patch.object(nn.functional, "dropout", _dropout_of_a_gpu),
        patch.object(Encoder, "_pad", _with_a_mask(Encoder._pad)),  # texts of one length, as if some were shorter
        patch.dict(ENCODER_TOKENS_WITH_GRADIENT, cpu=ENCODER_TOKENS_WITH_GRADIENT["cuda"]),
        PeakBytes() as peak,
    ):
        yield peak


def make_fake(module: nn.Module) -> None:
    """In place: weights and tables are fake ones of the same shape, whatever device they were on; ties stay."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                if tensor is not None and id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                kept[name] = None if tensor is None else made[id(tensor)]


DOCUMENTS, WORDS, TOKENS = 16, 126, 128
FAST: dict[str, Any] = {
    "bfloat16": {},
    "checkpointed": {"gradient_checkpointing": True},
    "chunked": {"chunk_tokens": 4096},
    "adapters": {"rank": 4},
}
SLOW: dict[str, Any] = {
    "float32": {"precision": "float32"},
    "queries": {"train": "query"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder in the usual proportions: heads of 64 numbers, and four times the width within a layer."""
    path = tmp_path_factory.mktemp("encoder")
    write_stand_in_encoder(path, hidden_size=128, num_layers=2)
    BertModel(BertConfig.from_pretrained(path, intermediate_size=512), add_pooling_layer=False).save_pretrained(path)
    return str(path)


@pytest.fixture
def config(folder: str, debug_config: Config) -> Config:
    """Four texts of 128 tokens with sixteen documents each, which a pass holds."""
    config = debug_config
    return replace(
        config,
        retriever=replace(config.retriever, path=folder, max_tokens=TOKENS),
        data=replace(config.data, context_tokens=TOKENS, document_tokens=TOKENS),
        retrieve=replace(config.retrieve, k=DOCUMENTS),
        train=replace(config.train, batch_size=4, precision=type(config.train.precision).bf16_mixed),
    )


def with_keys(config: Config, **keys: Any) -> Config:
    """Keys of `train` or `retriever`, `rank` of adapters."""
    if (rank := keys.pop("rank", None)) is not None:
        config = replace(config, lora=LoRAConfig(rank=rank))
    if "precision" in keys:
        keys["precision"] = type(config.train.precision)(keys["precision"])
    if "train" in keys:
        keys["train"] = type(config.retriever.train)(keys["train"])
    of_train = {name: value for name, value in keys.items() if hasattr(config.train, name)}
    of_retriever = {name: value for name, value in keys.items() if name not in of_train}
    return replace(config, train=replace(config.train, **of_train), retriever=replace(config.retriever, **of_retriever))


def module_of(config: Config) -> LSRModule:
    """Whose texts all have 128 tokens."""
    text = " ".join(["mida"] * WORDS)
    examples = SimpleNamespace(examples=lambda rows: [SimpleNamespace(query=text)] * len(rows))
    corpus = SimpleNamespace(tokens_by=None, texts=lambda rows: [text] * len(rows))
    stores = cast(Any, SimpleNamespace(queries=examples, corpus=corpus))
    return made_module(config, stores)


def measured_bytes(module: LSRModule, config: Config) -> int:
    """The most of a step that is not the first: forward, backward, optimizer."""
    batches = [np.arange(n * DOCUMENTS).reshape(n, DOCUMENTS) for n in (1, config.train.batch_size)]
    with gpu_memory() as memory:
        for encoder in encoders_of(module):
            make_fake(encoder)
        learning = [weight for weight in module.encoder.parameters() if weight.requires_grad]
        optimizer = torch.optim.Adam(learning, foreach=True)  # as torch has it by default on a GPU
        for rows in batches:
            memory.peak = memory.held
            step(module, rows, optimizer, config.train.precision.value != "float32")
        return memory.peak


def step(module: LSRModule, rows: np.ndarray, optimizer: torch.optim.Optimizer, autocast: bool) -> None:
    """In Lightning's order, which lets go of gradients before the backward pass."""
    batch = cast(Any, SimpleNamespace(query_rows=np.arange(len(rows)), doc_rows=rows))
    module.encoder.train_mode()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = module.similarities(batch).log_softmax(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    del loss
    optimizer.step()


def encoders_of(module: LSRModule) -> Sequence[Encoder]:
    return [module.encoder, *([module.frozen.encoder] if module.frozen else [])]


def planned_bytes(config: Config, size: ModelSize, ranks: int = 1) -> float:
    dtype = "float32" if config.train.precision.value == "float32" else "bfloat16"
    checkpointed, shape = config.train.gradient_checkpointing, shape_of(config, 1000)
    return train_bytes(size, shape, ranks, dtype, checkpointed, trained_part(config, size))


def check(config: Config) -> None:
    measured = measured_bytes(module_of(config), config)
    planned = planned_bytes(config, encoder_size(config.retriever.path))
    assert measured <= planned <= 1.05 * measured, (measured, planned)


@pytest.mark.parametrize("keys", FAST.values(), ids=FAST)
def test_the_plan_is_at_most_a_twentieth_above_what_a_step_holds(config: Config, keys: dict[str, Any]) -> None:
    check(with_keys(config, **keys))


@pytest.mark.slow
@pytest.mark.parametrize("keys", SLOW.values(), ids=SLOW)
def test_it_is_so_with_keys_that_few_set(config: Config, keys: dict[str, Any]) -> None:
    check(with_keys(config, **keys))


def test_the_papers_step_holds_what_was_measured_at_its_size() -> None:
    """Which takes half a minute: 64 x 21 texts of 128 tokens through twelve layers of 768."""
    config, size = load_config(Path(__file__).parents[2] / "configs/paper.yaml"), encoder_size("facebook/contriever")
    config = replace(config, train=replace(config.train, micro_batches=1))
    config.data.context_tokens = config.data.document_tokens = TOKENS - 2  # beside [CLS] and [SEP]
    measured = {(): 66.989, ("chunk_tokens", 8192): 4.944, ("gradient_checkpointing", True): 9.596}
    for keys, gigabytes in measured.items():
        asked = with_keys(config, **dict([keys] if keys else []))
        assert gigabytes <= planned_bytes(asked, size) / 1e9 <= 1.01 * gigabytes
    assert 104.056e9 <= planned_bytes(with_keys(config, precision="float32"), size) <= 1.02 * 104.056e9


def test_a_gated_layer_keeps_more_than_one_of_the_same_width() -> None:
    """Measured of Qwen3: 87.5 bytes for each token, layer and unit of width, BERT's are 41."""
    qwen = transformer(4, 1024, 3072, 16, 30_000, gated=True, kv_heads=8, head_width=128)
    found = layer_bytes(qwen, "bfloat16", 128, whole(qwen))
    assert 84 < found / 1024 < 92


@pytest.mark.parametrize("keys", [{}, {"rank": 4}])
def test_weights_gradients_and_moments_are_those_that_torch_has(debug_config: Config, tmp_path: Path, keys) -> None:
    """By the encoder's own counts to the byte; the plan's count leaves out biases and norms, adapters have none."""
    write_stand_in_encoder(tmp_path / "encoder", hidden_size=128, num_layers=3)
    lora = LoRAConfig(rank=keys.get("rank"))
    retriever = replace(debug_config.retriever, path=str(tmp_path / "encoder"))
    config = replace(debug_config, retriever=retriever, lora=lora)
    encoder = load_encoder(retriever)
    choose_trained_weights(config, encoder)
    learning = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning)
    encoder.encode_with_gradient(encoder.token_ids(["mida furo"]))[0, 0].backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = [*encoder.parameters(), *(weight.grad for weight in learning if weight.grad is not None), *moments]
    planned, count = trained_part(config, encoder_size(retriever.path)), sum(weight.numel() for weight in learning)
    own = replace(planned, parameters=sum(weight.numel() for weight in encoder.parameters()), learning=count)
    assert own.num_bytes == sum(tensor.nbytes for tensor in held)
    assert planned.learning == pytest.approx(count, rel=0 if lora.rank else 0.02)
    assert planned.parameters == pytest.approx(own.parameters, rel=0.05)  # a table of positions that is small elsewhere


def test_sizes_that_the_plan_cannot_know_are_refused_by_their_keys(paper: Config) -> None:
    with pytest.raises(UserError, match=r"index.dims is 1000, but .* have 768 numbers"):
        job_of(replace(paper, index=replace(paper.index, dims=1000)))
