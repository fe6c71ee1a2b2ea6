"""How fast the local LM scores mixed real texts, against the ways it is usually done; all in one run.

    python benchmarks/score_throughput.py [--queries 6] [--server-python /path/to/vllm/bin/python]

Same weights, dtype, threads and texts for all; the log-probs are compared before a ratio is printed. Ratios are
medians over rounds, each within its round, since a machine's speed drifts. The first two use the model as transformers
loads it, with torch's fused attention.

- one at a time: each pair through the whole model with all its logits, as REPLUG's own script scores
- padded batch: k documents of a query in file order, padded, all logits
- vllm: a real vLLM server on this machine's CPU, asked over HTTP by replug's own backend (--server-python)
- replug: length buckets, logits of the continuation only
- matrix products: what the LM's own products would take alone, in the same dtype; the limit of any of these
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.machine import describe_machine
from benchmarks.vllm_server import rates_of_vllm
from benchmarks.workloads import Pairs, mixed_pairs
from replug.models.batching import token_budget_batches
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import PairIds, pair_token_ids

TOLERANCE = 0.05  # nats, on average over all tokens: bf16 in other batches


def one_at_a_time(lm: HuggingFaceLM, pairs: list[PairIds]) -> list[np.ndarray]:
    scores = []
    with torch.inference_mode():
        for before, after in pairs:
            logits = lm.model(torch.tensor([before + after]), use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits.float(), -1)[len(before) - 1 : -1]
            scores.append(logprobs.gather(1, torch.tensor(after)[:, None])[:, 0].numpy())
    return scores


def padded_batches(lm: HuggingFaceLM, pairs: list[PairIds], k: int) -> list[np.ndarray]:
    scores = []
    with torch.inference_mode():
        for start in range(0, len(pairs), k):
            batch = pairs[start : start + k]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(b + a) for b, a in batch], batch_first=True)
            logprobs = torch.log_softmax(lm.model(ids, use_cache=False).logits.float(), -1)
            for row, (before, after) in enumerate(batch):
                positions = logprobs[row, len(before) - 1 : len(before) + len(after) - 1]
                scores.append(positions.gather(1, torch.tensor(after)[:, None])[:, 0].numpy())
    return scores


def in_units(lm: HuggingFaceLM, pairs: Pairs, unit_bytes: int) -> list[np.ndarray]:
    """As a replica of the pool gets them: in units of similar length."""
    lengths = [len((p + c).encode()) for p, c in zip(pairs.prefixes, pairs.continuations, strict=True)]
    scores: dict[int, np.ndarray] = {}
    for rows in token_budget_batches(lengths, unit_bytes):
        found = lm.score([pairs.prefixes[r] for r in rows], [pairs.continuations[r] for r in rows])
        scores |= {row: score.token_logprobs for row, score in zip(rows, found, strict=True)}
    return [scores[row] for row in range(len(pairs))]


def flop_per_second(dtype: torch.dtype, shapes: list[tuple[int, int]], tokens: int) -> float:
    """Of the model's own products: [tokens, K] x [K, N] for every (N, K) of its layers."""
    weights = {shape: torch.randn(shape, dtype=dtype) for shape in set(shapes)}
    inputs = {k: torch.randn(tokens, k, dtype=dtype) for _, k in weights}
    flop = sum(2 * tokens * n * k for n, k in shapes)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for n, k in shapes:
            torch.nn.functional.linear(inputs[k], weights[n, k])
        seconds.append(time.perf_counter() - start)
    return flop / statistics.median(seconds)


def flop_per_token(model: PreTrainedModel, pairs: list[PairIds]) -> float:
    """Products with weights, attention (causal: half of it), and the output layer for continuation tokens only."""
    config = model.config
    tokens = sum(len(b) + len(a) for b, a in pairs)
    weights = sum(n * k for n, k in layer_shapes(model))
    attention = sum(2 * config.hidden_size * (len(b) + len(a)) ** 2 for b, a in pairs) * config.num_hidden_layers
    output = config.vocab_size * config.hidden_size * sum(len(a) for _, a in pairs)
    return 2 * weights + (attention + 2 * output) / tokens


def layer_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    head = model.get_output_embeddings()
    return [tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def timed(name: str, tokens: int, run: Callable[[], list[np.ndarray]]) -> tuple[float, list[np.ndarray]]:
    start = time.perf_counter()
    scores = run()
    rate = tokens / (time.perf_counter() - start)
    print(f"{name:>16}: {rate:7.0f} tokens/s", flush=True)
    return rate, scores


def differences(scores: list[np.ndarray], expected: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.abs(a - b) for a, b in zip(scores, expected, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--server-python", help="Python of an environment with vllm")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(describe_machine(arguments.threads))

    path = resolve_lm_path("package:smollm2")
    lm = HuggingFaceLM(path, dtype=torch.bfloat16)
    texts = mixed_pairs(lm.tokenizer, arguments.queries)
    pairs = [pair_token_ids(lm.tokenizer, p, c) for p, c in zip(texts.prefixes, texts.continuations, strict=True)]
    tokens = sum(len(b) + len(a) for b, a in pairs)
    print(f"{len(texts)} pairs, {tokens} tokens, {tokens / len(texts):.0f} in a pair, k = {texts.k}")

    unit_bytes = 4 * 8 * lm.tokens_per_batch
    ways: dict[str, Callable[[], list[np.ndarray]]] = {
        "one at a time": lambda: one_at_a_time(lm, pairs),
        "padded batch": lambda: padded_batches(lm, pairs, texts.k),
        "replug": lambda: in_units(lm, texts, unit_bytes),
    }
    in_units(lm, Pairs(texts.prefixes[:8], texts.continuations[:8], 8), unit_bytes)  # warm

    rounds: list[dict[str, float]] = []
    scores: dict[str, list[np.ndarray]] = {}
    for _ in range(arguments.rounds):
        rates = {"matrix products": limit(lm, pairs)}
        for name, run in ways.items():
            rates[name], scores[name] = timed(name, tokens, run)
        rates["matrix products"] = (rates["matrix products"] + limit(lm, pairs)) / 2
        rounds.append(rates)
    check_equal(scores)
    report(rounds, "replug")
    if arguments.server_python:
        server_rounds, scores["vllm"] = against_vllm(arguments.server_python, path, texts, ways["replug"], tokens)
        check_equal(scores)
        report(server_rounds, "replug")
    print(f"padding: {padding_waste(lm, texts, unit_bytes):.1%} of what replug computes")


def limit(lm: HuggingFaceLM, pairs: list[PairIds]) -> float:
    """Tokens a second if the LM were nothing but its matrix products."""
    rate = flop_per_second(torch.bfloat16, layer_shapes(lm.model), lm.tokens_per_batch)
    print(f"{'matrix products':>16}: {rate / flop_per_token(lm.model, pairs):7.0f} tokens/s, {rate / 1e9:.0f} GFLOP/s")
    return rate / flop_per_token(lm.model, pairs)


def against_vllm(
    python: str, path: str, texts: Pairs, replug: Callable[[], list[np.ndarray]], tokens: int
) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Rounds before, with and after the server, which is stopped while replug computes."""
    before = [timed("replug", tokens, replug)[0] for _ in range(2)]
    served, scores = rates_of_vllm(python, path, texts, tokens, rounds=2)
    after = [timed("replug", tokens, replug)[0] for _ in range(2)]
    own = statistics.median(before + after)
    return [{"vllm": rate, "replug": own} for rate in served], scores


def check_equal(scores: dict[str, list[np.ndarray]]) -> None:
    for name, found in scores.items():
        mean = differences(found, scores["one at a time"]).mean()
        assert mean < TOLERANCE, f"{name} differs from one at a time by {mean:.3f} nats on average"
        print(f"{name:>16}: log-probs differ from one at a time by {mean:.4f} nats on average")


def report(rounds: list[dict[str, float]], ours: str) -> None:
    for name in rounds[0]:
        ratio = statistics.median(rates[ours] / rates[name] for rates in rounds)
        rate = statistics.median(rates[name] for rates in rounds)
        print(f"{name:>16}: median {rate:6.0f} tokens/s; replug has {ratio:.2f} times that")


def padding_waste(lm: HuggingFaceLM, texts: Pairs, unit_bytes: int) -> float:
    tokens, padded = lm.counts["tokens"], lm.counts["padded_tokens"]
    in_units(lm, texts, unit_bytes)
    return 1 - (lm.counts["tokens"] - tokens) / (lm.counts["padded_tokens"] - padded)


if __name__ == "__main__":
    main()
