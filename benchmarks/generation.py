"""Measure the gain of answering many prompts together, and of keeping what they share once.

    python -m benchmarks.generation [--prompts 8] [--k 5] [--tokens 32] [--rounds 3] [--samples 20 --shots 1000]

`ReplugLM.generate` of a list is compared with a call for each prompt. Each prompt has documents of its own, and its
answer is mixed over them. With --samples, answers that are drawn after so many tokens of shots are decoded in one row,
and with keys and values of its own for each. Counted and printed: answers that are equal. Two may differ where bfloat16
rounds two tokens to nearly the same probability; in float32 all are equal.
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
from replug.models.local.decoding import PACKED, PADDED
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path
from replug.models.replug_lm import ReplugLM

NUM_DOCUMENTS = 200


def seconds(answer: Callable[[], list[str]]) -> tuple[float, list[str]]:
    start = time.perf_counter()
    answers = answer()
    return time.perf_counter() - start, answers


def prompts_after_shots(cut: Cutter, num_shots: int, num_samples: int) -> tuple[list[str], GenerationOptions]:
    """Return two prompts that begin with the same shots of so many tokens, and how their answers are drawn."""
    shots = cut.text(num_shots, num_shots)
    options = GenerationOptions(16, num_samples=num_samples, temperature=1.0, top_p=0.9, opening=shots or None)
    return [shots + cut.text(100, 100) for _ in range(2)], options


def compare_rows(lm: HuggingFaceLM, cut: Cutter, arguments: argparse.Namespace) -> None:
    """Print the seconds of drawn answers in one row and with a copy of keys and values for each."""
    prompts, options = prompts_after_shots(cut, arguments.shots, arguments.samples)

    def drawn(is_packed: bool) -> tuple[float, list[str]]:
        lm._cache_use = PACKED if is_packed else PADDED
        return seconds(lambda: [one.text for some in lm.sample(prompts, options) for one in some])

    ratios = []
    for _ in range(arguments.rounds):
        (copied, expected), (in_a_row, answers) = drawn(False), drawn(True)
        ratios.append(copied / in_a_row)
        equal = sum(one == other for one, other in zip(answers, expected, strict=True))
        ways = f"{copied:.2f} s with copies, {in_a_row:.2f} s in one row, {ratios[-1]:.2f}x"
        print(f"{ways}; {equal} of {len(answers)} samples are equal", flush=True)
    print(f"median {statistics.median(ratios):.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--shots", type=int, default=1000)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    print(describe_machine(torch.get_num_threads()))
    local = HuggingFaceLM(resolve_lm_path("package:smollm2"), dtype=resolve_dtype(arguments.dtype))
    cut = Cutter(local.tokenizer, 100 * (NUM_DOCUMENTS + arguments.prompts), seed=0)
    if arguments.samples:
        compare_rows(local, cut, arguments)
        return
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
