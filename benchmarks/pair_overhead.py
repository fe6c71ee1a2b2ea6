"""What a scored pair costs outside the model: microseconds of a core's time, by part, median of rounds.

    python -m benchmarks.pair_overhead --rounds 7

Real texts of the LM's tokenizer, a training step's pairs in the units of a GPU's replica. Nothing is computed by a
model: what is timed stands before its passes. A scoring batch is tokenized in one call, while the device works on the
batch before it. The device waits for grouping and positions, and for the transport that Ray does.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from benchmarks.machine import describe_machine
from benchmarks.workloads import Pairs, mixed_pairs
from replug.models.batching import MOST_TOKENS_GPU, even_batches, units_of_similar_length
from replug.models.local.decoding import shared_tokens
from replug.models.local.output_layer import continuation_positions
from replug.models.model_files import load_lm_tokenizer
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import PairIds, inputs_of, pairs_token_ids

Unit = tuple[list[str], list[str]]  # prefixes and continuations


def units_of(pairs: Pairs) -> list[Unit]:
    units = units_of_similar_length(pairs.prefixes, pairs.continuations, MOST_TOKENS_GPU)
    return [([pairs.prefixes[row] for row in rows], [pairs.continuations[row] for row in rows]) for rows in units]


def batch_up(ids: list[PairIds]) -> None:
    """What a replica does between tokens and tensors."""
    shared_tokens([before for before, _ in ids])
    inputs = inputs_of(ids)
    for rows in even_batches([one.num_tokens for one in inputs], 2 * MOST_TOKENS_GPU):
        continuation_positions([pair for row in rows for pair in inputs[row].pairs])


def median_microseconds(work: Callable[[], object], pairs: int, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.process_time()  # of this process: others on the machine do not count
        work()
        seconds.append(time.process_time() - start)
    return 1e6 * statistics.median(seconds) / pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="package:smollm2", help="whose tokenizer")
    parser.add_argument("--queries", type=int, default=16, help="with 20 documents each")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as a replica has it
    tokenizer = load_lm_tokenizer(resolve_lm_path(arguments.lm))
    pairs = mixed_pairs(tokenizer, arguments.queries)
    units = units_of(pairs)
    ids = [pairs_token_ids(tokenizer, *unit) for unit in units]
    parts: dict[str, Callable[[], object]] = {
        "tokenizing": lambda: [pairs_token_ids(tokenizer, *unit) for unit in units],
        "grouping and positions (device waits)": lambda: [batch_up(unit) for unit in ids],
        "units in the trainer": lambda: units_of(pairs),
    }
    print(describe_machine(1))
    print(f"{len(pairs)} pairs in {len(units)} units, {sum(len(b) + len(a) for unit in ids for b, a in unit)} tokens")
    for name, work in parts.items():
        print(f"{name:42} {median_microseconds(work, len(pairs), arguments.rounds):8.1f} us a pair", flush=True)


if __name__ == "__main__":
    main()
