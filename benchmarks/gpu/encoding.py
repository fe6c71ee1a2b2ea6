"""Embedding and training: BERT-base with random weights for speed and memory, MiniLM's real weights for vectors."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks.gpu.kit import PEAK_FLOPS, Kit
from benchmarks.gpu.scoring import numpy_texts
from replug.config.load import load_config
from replug.data.datamodule import Position
from replug.data.records import Example, RetrievedBatch, ScoredBatch
from replug.models.batching import ENCODER_TOKENS_WITH_GRADIENT
from replug.models.encoder import Encoder
from replug.models.packaged import resolve_encoder_path
from replug.planning.memory import pass_bytes, train_bytes
from replug.planning.model_sizes import ENCODERS
from replug.train.module import LSRModule

PAPER = Path(__file__).parents[2] / "configs/paper.yaml"
BERT_FLOP = 24 * 12 * 768**2  # of a token, without attention
TOKENS_PER_PASS = 32_768


def bert(kit: Kit) -> Path:
    """Write a random BERT of Contriever's size, once; a small one where the CPU stands in."""
    folder = kit.folder / "bert"
    if not folder.is_dir():
        layers, width = (2, 64) if kit.pretends else (12, 768)
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
        )
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve_encoder_path("package:minilm")).save_pretrained(folder)
    return folder


def random_ids(count: int, length: int) -> list[np.ndarray]:
    """Return token ids of so many texts of one length."""
    rng = np.random.default_rng(0)
    return [rng.integers(2000, 30_000, length).astype(np.uint16) for _ in range(count)]


def embedding(kit: Kit) -> None:
    """Hold MiniLM's vectors against the CPU's; time BERT-base and count the stops of the host."""
    path, texts = resolve_encoder_path("package:minilm"), numpy_texts(24)
    expected = Encoder(path).encode(texts).numpy()
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        found = Encoder(path).to(kit.device, dtype).eval().encode(texts, TOKENS_PER_PASS).float().cpu().numpy()
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        apart = float((1 - (found * expected).sum(1) / lengths).max())
        kit.say(f"MiniLM {str(dtype).removeprefix('torch.')}: 1 - cosine to the CPU's, largest", apart, "", most)

    encoder = Encoder(str(bert(kit))).to(kit.device, torch.bfloat16).eval()
    count = 32 if kit.pretends else 8192
    rates = {}
    for length in (128, 130):
        ids = random_ids(count, length)
        kit.begin_memory()
        rates[length] = count / kit.seconds(lambda ids=ids: encoder.encode_tokens(ids, TOKENS_PER_PASS), 3, 1)  # type: ignore[misc]
        kit.say(f"BERT-base bf16, documents of {length} tokens", rates[length], "documents/s")
    flop = 128 * (BERT_FLOP + 4 * 12 * 128 * 768)
    kit.say("128 tokens, share of 989 TFLOP/s", rates[128] * flop / PEAK_FLOPS)
    kit.say_memory("memory of a builder's pass", pass_bytes(ENCODERS["contriever"], TOKENS_PER_PASS, "bfloat16"))
    mixed = [row[: 96 + number % 33] for number, row in enumerate(random_ids(count, 128))]
    rate = sum(map(len, mixed)) / kit.seconds(lambda: encoder.encode_tokens(mixed, TOKENS_PER_PASS), 3, 1)
    kit.say("mixed lengths, tokens/s over those of 128", rate / (128 * rates[128]), "x", at_least=kit.on_gpu(0.7))
    for name, some in (("one length", random_ids(count // 4, 128)), ("mixed lengths", mixed[: count // 4])):
        stops = kit.stops(lambda some=some: encoder.encode_tokens(some, TOKENS_PER_PASS))  # type: ignore[misc]
        kit.say(f"stops of the host in all passes, {name}", stops, "", 1)  # vectors are fetched at the end
    table = torch.from_numpy(np.stack(random_ids(count, 128)).astype(np.int64)).to(kit.device)

    def bare(mask: bool) -> torch.Tensor:
        parts = []
        with torch.inference_mode():
            for rows in table.split(256):
                given = {"attention_mask": torch.ones_like(rows)} if mask else {}
                states = encoder.backbones[0](input_ids=rows, **given).last_hidden_state
                parts.append(torch.nn.functional.normalize(states.float().mean(1), dim=-1))
        return torch.cat(parts).cpu()

    without = count / kit.seconds(lambda: bare(False), 3, 1)
    kit.say("the bare model without a mask", without, "documents/s")
    kit.say("the bare model with a mask of ones", count / kit.seconds(lambda: bare(True), 3, 1), "documents/s")
    kit.say("replug over the bare model", rates[128] / without, "x", at_least=kit.on_gpu(0.85))
    library = encoder.model.to(kit.device)
    words = [" ".join(["time"] * 126)] * (count // 4)
    took = kit.seconds(lambda: library.encode(words, batch_size=256, show_progress_bar=False), 2, 1)
    kit.say("SentenceTransformer.encode, texts of 128 tokens", count // 4 / took, "documents/s")
    took = kit.seconds(lambda: encoder.encode(words, TOKENS_PER_PASS), 2, 1)
    kit.say("replug's encode, the same texts", count // 4 / took, "documents/s")


WAYS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bf16": {},
    "bf16, passes of 8,192 tokens": {"tokens": 8192},
    "bf16, passes of 32,768 tokens": {"tokens": 32_768},
    "bf16, one pass": {"tokens": 90_000},
    "bf16, chunks of 8,192 tokens": {"chunk": 8192},
}


def training(kit: Kit) -> None:
    """Time a step of the paper's size on one GPU in four ways, and hold its memory against the plan."""
    losses = {name: _step(kit, name, **way) for name, way in WAYS.items()}
    kit.say("first loss, bf16 - float32", abs(losses["bf16"] - losses["float32"]), "nats", 0.01)


def _step(
    kit: Kit,
    name: str,
    bf16: bool = True,
    chunk: int | None = None,
    tokens: int | None = None,
) -> float:
    size, k, length = (2, 4, 16) if kit.pretends else (32, 20, 128)
    config = load_config(PAPER, [])
    rng = np.random.default_rng(0)
    kit.begin_memory()
    encoder = Encoder(str(bert(kit))).to(kit.device)
    encoder.chunk_tokens = chunk
    ids = random_ids(size * k, length)
    sizes = {"cpu": 8192, "cuda": tokens or ENCODER_TOKENS_WITH_GRADIENT["cuda"]}
    encoder.document_ids = lambda corpus, rows: [ids[row] for row in rows]  # type: ignore[method-assign, assignment]
    examples = [Example(str(row), "time " * (length - 2), "x", "d") for row in range(size)]
    queries: Any = SimpleNamespace(examples=lambda rows: [examples[row] for row in rows])
    corpus: Any = SimpleNamespace(tokens_by=None)
    rows = np.arange(size * k).reshape(size, k)
    found = RetrievedBatch(0, 0, 0, 0, np.arange(size), rows, rng.random((size, k), np.float32))
    scores = 20 * rng.standard_normal((size, k)).astype(np.float32)
    batches: Any = SimpleNamespace(take=lambda step: ScoredBatch(found, scores, np.full(size, 128)))
    module = LSRModule(config, encoder, batches, queries, corpus).to(kit.device)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)

    def forward() -> torch.Tensor:
        with (
            patch.dict(ENCODER_TOKENS_WITH_GRADIENT, sizes),
            torch.autocast(kit.device.type, torch.bfloat16, enabled=bf16),
        ):
            return module.training_step(Position(0), 0)

    def step() -> float:
        loss = forward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first = step()
    took = kit.seconds(step, 4, 1)
    kit.say(f"{name}: a step of {size} x {k + 1} texts", took, "s")
    flop = 3 * size * (k + 1) * length * (BERT_FLOP + 4 * 12 * length * 768)
    kit.say(f"{name}: share of 989 TFLOP/s", flop / took / PEAK_FLOPS)
    if not kit.pretends:
        precision = type(config.train.precision)("bf16_mixed" if bf16 else "float32")
        keys = {"batch_size": size, "micro_batches": 1, "chunk_tokens": chunk}
        train = replace(config.train, precision=precision, **keys)
        measured = replace(config, train=train, retrieve=replace(config.retrieve, k=k))
        planned = train_bytes(measured, ENCODERS["contriever"], 1, has_bfloat16=True)
        kit.say_memory(f"{name}: memory", planned, 0.95, 1.3)
    kit.say(f"{name}: stops of the host before the backward pass", kit.stops(forward), at_most=0)
    return first
