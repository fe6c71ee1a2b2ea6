"""Measure the gain of answering many prompts together.

    python -m benchmarks.generation [--prompts 8] [--k 5] [--tokens 32] [--rounds 3]

`ReplugLM.generate` of a list is compared with a call for each prompt. Each prompt has documents of its own, and its
answer is mixed over them. Counted and printed: answers that are equal. Two may differ where bfloat16 rounds two tokens
to nearly the same probability; in float32 all are equal.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.machine import describe_machine
from benchmarks.workloads import Cutter
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.generation import GenerationOptions
from replug.models.hardware import resolve_dtype
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path
from replug.models.replug_lm import ReplugLM

NUM_DOCUMENTS = 200


def seconds(answer: Callable[[], list[str]]) -> tuple[float, list[str]]:
    start = time.perf_counter()
    answers = answer()
    return time.perf_counter() - start, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    print(describe_machine(torch.get_num_threads()))
    local = HuggingFaceLM(resolve_lm_path("package:smollm2"), dtype=resolve_dtype(arguments.dtype))
    cut = Cutter(local.tokenizer, 100 * (NUM_DOCUMENTS + arguments.prompts), seed=0)
    documents = [cut.text(20, 100) for _ in range(NUM_DOCUMENTS)]
    prompts = [cut.text(30, 60) for _ in range(arguments.prompts)]
    lm = ReplugLM(local, EncoderRetriever(Encoder("package:minilm"), documents), arguments.k)
    options = GenerationOptions(arguments.tokens)
    lm.generate(prompts[:1], GenerationOptions(2))  # warm
    ratios = []
    for _ in range(arguments.rounds):
        apart, expected = seconds(lambda: [lm.generate(prompt, options).text for prompt in prompts])
        together, answers = seconds(lambda: [answer.text for answer in lm.generate(prompts, options)])
        ratios.append(apart / together)
        equal = sum(one == other for one, other in zip(answers, expected, strict=True))
        ways = f"{apart:.2f} s apart, {together:.2f} s together, {ratios[-1]:.2f}x"
        print(f"{ways}; {equal} of {len(prompts)} answers are equal", flush=True)
    print(f"median {statistics.median(ratios):.2f}x")


if __name__ == "__main__":
    main()
