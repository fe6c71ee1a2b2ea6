"""What it saves to compute a prefix once that all inputs share: few-shot demonstrations before ten documents.

    python -m benchmarks.shared_prefix

Prompts of 16 demonstrations (2,000 tokens), a document of 100 tokens and a question, scored without the shared
prefix, with it, and with it kept from a call before, and one prompt alone. Then where sharing begins to pay, and
whether documents that recur under many queries should be shared too. Equal log-probs are checked.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.machine import describe_machine
from benchmarks.workloads import Cutter
from replug.models.black_box_lm import ContinuationScore
from replug.models.hardware import resolve_dtype
from replug.models.local import shared_prefix
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path

Texts = tuple[list[str], list[str]]


def prompts(cut: Cutter, shared: int, own: int, count: int) -> Texts:
    """`count` inputs that share their first `shared` tokens and have `own` of their own, with a short answer."""
    beginning = cut.text(shared, shared)
    return [f"{beginning}\n{cut.text(own, own)}" for _ in range(count)], [" the answer is array"] * count


def seconds(score: Callable[[], list[ContinuationScore]], rounds: int) -> tuple[float, list[ContinuationScore]]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        scores = score()
        times.append(time.perf_counter() - start)
    return statistics.median(times), scores


def score_first(lm: HuggingFaceLM, texts: Texts) -> list[ContinuationScore]:
    """As the first call with these demonstrations is scored."""
    lm._kept.clear()
    return lm.score(*texts)


def compare(lm: HuggingFaceLM, name: str, texts: Texts, rounds: int) -> tuple[float, float]:
    """Seconds without and with sharing."""
    limits = shared_prefix.MIN_SHARED_TOKENS, shared_prefix.SHARED_STEP
    shared_prefix.MIN_SHARED_TOKENS, shared_prefix.SHARED_STEP = 1, 1
    shared, scores = seconds(lambda: score_first(lm, texts), rounds)
    kept, _ = seconds(lambda: lm.score(*texts), rounds)
    shared_prefix.MIN_SHARED_TOKENS, shared_prefix.SHARED_STEP = limits
    lm._shares = False
    apart, expected = seconds(lambda: lm.score(*texts), rounds)
    lm._shares = True
    difference = np.mean(
        [np.abs(a.token_logprobs - b.token_logprobs).mean() for a, b in zip(scores, expected, strict=True)]
    )
    assert difference < 0.1, f"log-probs differ by {difference:.3f} nats on average"
    ratios = f"{apart / shared:.2f}x; {kept:.2f} s kept, {apart / kept:.2f}x"
    print(f"{name}: {apart:.2f} s apart, {shared:.2f} s shared, {ratios}", flush=True)
    return apart, shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(describe_machine(arguments.threads))
    lm = HuggingFaceLM(resolve_lm_path("package:smollm2"), resolve_dtype("auto"))
    cut = Cutter(lm.tokenizer, 40_000, seed=0)
    few_shot = prompts(cut, 2000, 130, 10)
    one, _ = seconds(lambda: lm.score(few_shot[0][:1], few_shot[1][:1]), arguments.rounds)
    _, shared = compare(lm, "16 demonstrations (2,000 tokens) + 10 documents", few_shot, arguments.rounds)
    print(f"  one prompt alone takes {one:.2f} s: ten cost {shared / one:.2f} times one")
    for tokens in (16, 32, 64, 128, 256):
        compare(
            lm, f"{tokens} shared of {tokens + 130} tokens, 10 inputs", prompts(cut, tokens, 130, 10), arguments.rounds
        )
    for count in (2, 4, 8):
        texts = prompts(cut, 128, 256, count)
        compare(lm, f"one document of 128 tokens under {count} queries of 256", texts, arguments.rounds)


if __name__ == "__main__":
    main()
