"""Scoring: GPT-2 XL with random weights for speed and memory, SmolLM2's real weights for log-probs."""

import time
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from benchmarks.gpu.kit import PEAK_FLOPS, Kit
from replug.models.local import hf_lm
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import PairIds
from replug.planning.memory import score_bytes
from replug.planning.model_sizes import LMS

PAPER_PAIR = (256, 128)  # tokens of a document with the context, and of the continuation
ROWS_OF_PLAIN = 20  # of one batch of plain transformers: a text's documents


def random_lm(config: GPT2Config, device: torch.device) -> HuggingFaceLM:
    """Return an LM of random weights, made on the device: its speed and memory are those of trained ones."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    instead = {
        "resolve_lm_path": lambda path: path,
        "load_lm_tokenizer": lambda path: None,
        "load_causal_lm": lambda *given: model,
        "lm_identity": lambda *given: "random",
        "require_sense": lambda lm, path: None,
    }
    with patch.multiple(hf_lm, **instead):
        return HuggingFaceLM("random", dtype=torch.bfloat16, device=device)


def gpt2_xl(pretends: bool = False) -> GPT2Config:
    """Return the configuration of GPT-2 XL, or of a small one of its kind."""
    if pretends:
        return GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=1024, vocab_size=600)
    return GPT2Config(n_layer=48, n_embd=1600, n_head=25)


def random_pairs(lengths: list[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[PairIds]:
    """Return pairs of random token ids with these numbers of tokens."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(100, vocabulary, a).tolist(), rng.integers(100, vocabulary, b).tolist()) for a, b in lengths]


def num_tokens(pairs: list[PairIds]) -> int:
    """Return the tokens of pairs."""
    return sum(len(prefix) + len(continuation) for prefix, continuation in pairs)


def score(lm: HuggingFaceLM, pairs: list[PairIds], tokens: int) -> list[np.ndarray]:
    """Score pairs in units of so many tokens, each of them one pass, as a replica does."""
    lm.tokens_per_batch = tokens
    size = max(1, tokens * len(pairs) // num_tokens(pairs))
    pending = [lm.launch(pairs[at : at + size]) for at in range(0, len(pairs), size)]
    return [one.token_logprobs for scores in pending for one in scores.result()]


def scoring(kit: Kit) -> None:
    """Time GPT-2 XL by the size of its passes, beside plain transformers; hold its memory against the plan."""
    config = gpt2_xl(kit.pretends)
    lm = random_lm(config, kit.device)
    rng, count = np.random.default_rng(1), 16 if kit.pretends else 320
    same = random_pairs([PAPER_PAIR] * count, config.vocab_size)
    lengths = [(int(rng.integers(36, 257)), int(rng.integers(16, 129))) for _ in range(count)]
    kinds = {
        "same lengths": same,
        "mixed lengths, in order": random_pairs(sorted(lengths), config.vocab_size),
        "mixed lengths": random_pairs(lengths, config.vocab_size),
    }
    kit.say("tokens of a pass by default", lm.tokens_per_batch)
    for tokens in (4096,) if kit.pretends else (4096, 8192, 16_384):
        for kind, pairs in kinds.items():
            took = kit.seconds(lambda pairs=pairs, tokens=tokens: score(lm, pairs, tokens), 3, 1)  # type: ignore[misc]
            kit.say(f"GPT-2 XL, passes of {tokens}, {kind}", num_tokens(pairs) / took, "tokens/s")
            if pairs is same:
                kit.say(
                    "the same, share of 989 TFLOP/s", _flop(config, pairs) / took / PEAK_FLOPS, at_least=kit.on_gpu(0.4)
                )
    unit = same[:10]
    lm.tokens_per_batch = 4096
    whole = kit.seconds(lambda: lm.launch(unit).result(), 8)
    kit.say("10 pairs from launch to scores", 1e3 * whole, "ms")
    kit.say("10 pairs launched: the host's time", 1e3 * _host_seconds(kit, lm, unit), "ms", kit.on_gpu(800 * whole))
    kit.say("stops of the host in a launch", kit.stops(lambda: lm.launch(unit)), at_most=0)
    mixed = kinds["mixed lengths"]
    plain = kit.seconds(lambda: plain_transformers(lm.model, mixed), 2, 1)
    ours = kit.seconds(lambda: score(lm, mixed, 8192), 3, 1)
    kit.say("plain transformers, 20 padded rows, all logits", num_tokens(mixed) / plain, "tokens/s")
    kit.say("replug over plain transformers, the same order", plain / ours, "x", at_least=kit.on_gpu(1.3))
    kit.begin_memory()
    score(lm, same, 8192)
    kit.say_memory("memory of a scorer", score_bytes(LMS["gpt2-xl"], 8192, "bfloat16"))


def plain_transformers(model: PreTrainedModel, pairs: list[PairIds]) -> list[torch.Tensor]:
    """Score pairs as people do: a text's documents padded, all logits, log-softmax in float32."""
    found = []
    with torch.inference_mode():
        for at in range(0, len(pairs), ROWS_OF_PLAIN):
            rows = [torch.tensor(prefix + rest) for prefix, rest in pairs[at : at + ROWS_OF_PLAIN]]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
            ones = [torch.ones(len(row), dtype=torch.long) for row in rows]
            mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True).to(model.device)
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            logprobs = torch.log_softmax(logits.float(), -1)[:, :-1]
            found.append(logprobs.gather(2, ids[:, 1:, None])[..., 0].cpu())
    return found


def _host_seconds(kit: Kit, lm: HuggingFaceLM, unit: list[PairIds]) -> float:
    found = []
    for _ in range(6):
        kit.wait()
        start = time.perf_counter()
        pending = lm.launch(unit)
        found.append(time.perf_counter() - start)
        pending.result()
    return float(np.median(found))


def _flop(config: GPT2Config, pairs: list[PairIds]) -> float:
    layers, width = config.n_layer, config.n_embd
    total = 0.0
    for prefix, rest in pairs:
        length = len(prefix) + len(rest)
        total += 24 * layers * width**2 * length + 2 * layers * width * length**2
        total += 2 * width * config.vocab_size * len(rest)
    return total


def real_lm(kit: Kit) -> None:
    """Hold SmolLM2's log-probs on the device against the CPU's in float32, and time it by the size of its passes."""
    path, texts = resolve_lm_path("package:smollm2"), numpy_texts(8 if kit.pretends else 24)
    prefixes = [text[: 120 + 11 * number] for number, text in enumerate(texts)]
    continuations = [text[420:560] for text in texts]

    def logprobs(lm: HuggingFaceLM) -> np.ndarray:
        return np.concatenate([one.token_logprobs for one in lm.score(prefixes, continuations)])

    expected = logprobs(HuggingFaceLM(path))
    for dtype, mean, most in ((torch.float32, 1e-4, 1e-3), (torch.bfloat16, 0.06, 1.0)):
        lm = HuggingFaceLM(path, dtype=dtype, device=kit.device)
        name, apart = str(dtype).removeprefix("torch."), np.abs(logprobs(lm) - expected)
        kit.say(f"SmolLM2 {name}, nats a token from the CPU's, mean", float(apart.mean()), "nats", mean)
        kit.say(f"SmolLM2 {name}, nats a token from the CPU's, largest", float(apart.max()), "nats", most)
    kit.say("values that differ in the same call twice", int((logprobs(lm) != logprobs(lm)).sum()), at_most=0)
    pairs = random_pairs([PAPER_PAIR] * (8 if kit.pretends else 640), 49_000)
    for tokens in (4096,) if kit.pretends else (8192, 16_384, 32_768, 65_536):
        took = kit.seconds(lambda tokens=tokens: score(lm, pairs, tokens), 3, 1)  # type: ignore[misc]
        kit.say(f"SmolLM2, passes of {tokens}", num_tokens(pairs) / took, "tokens/s")
    if not kit.pretends:
        _halve(kit, HuggingFaceLM(path, device=kit.device), pairs[:256])


def _halve(kit: Kit, lm: HuggingFaceLM, pairs: list[PairIds]) -> None:
    """Score a pass that memory does not hold: it is halved until memory does, and has the scores of small passes."""
    expected = np.concatenate(score(lm, pairs, 4096))
    of_larger = float(np.abs(np.concatenate(score(lm, pairs, 16_384)) - expected).max())
    kit.say("passes of 16,384 tokens, nats from those of 4,096", of_larger, "nats")
    kit.begin_memory()
    room = 1.2e9 + torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    found = np.concatenate(score(lm, pairs, num_tokens(pairs)))
    torch.cuda.set_per_process_memory_fraction(1.0)
    kit.say(
        "a pass halved for want of memory, nats from small ones", float(np.abs(found - expected).max()), "nats", 1e-3
    )


def numpy_texts(count: int) -> list[str]:
    """Return docstrings of numpy of 800 characters or more."""
    found = [str(getattr(np, name).__doc__) for name in sorted(vars(np)) if callable(getattr(np, name))]
    long = [text for text in found if len(text) > 800]
    assert len(long) >= count, f"numpy has {len(long)} long docstrings; expected {count}"
    return long[:count]
