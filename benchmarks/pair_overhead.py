"""What a scored pair costs outside the model: microseconds of a core's time, by part, median of rounds.

    python -m benchmarks.pair_overhead --rounds 7

Real texts of the LM's tokenizer, a training step's pairs in the units of a GPU's replica. Nothing is computed by a
model: what is timed is what stands before and behind its passes. Before: every pair was tokenized by itself, between
two passes. Now a unit is tokenized in one call, while the device is at the unit before.

`device waits` is what is left between two passes of a replica, beside the transport that Ray does.
"""

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.workloads import Pairs, mixed_pairs
from replug.models.batching import FEWEST_TOKENS_GPU, MOST_TOKENS_GPU, even_batches, units_of_similar_length
from replug.models.black_box_lm import ContinuationScore
from replug.models.local.decoding import shared_tokens
from replug.models.local.output_layer import continuation_positions
from replug.models.model_files import load_lm_tokenizer
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import PairIds, inputs_of, pair_token_ids, pairs_token_ids
from replug.models.score_cache import NewScore, ScoreCache, pair_key

Unit = tuple[list[str], list[str]]  # prefixes and continuations


def units_of(pairs: Pairs, num_tokens: int = MOST_TOKENS_GPU) -> list[Unit]:
    units = units_of_similar_length(pairs.prefixes, pairs.continuations, num_tokens)
    return [([pairs.prefixes[row] for row in rows], [pairs.continuations[row] for row in rows]) for rows in units]


def batch_up(ids: list[PairIds]) -> None:
    """What a replica does between tokens and tensors."""
    shared_tokens([before for before, _ in ids])
    inputs = inputs_of(ids)
    for rows in even_batches([one.num_tokens for one in inputs], 2 * MOST_TOKENS_GPU):
        continuation_positions([pair for row in rows for pair in inputs[row].pairs])


def padding(ids: list[list[PairIds]], pass_tokens: int) -> float:
    """What padded passes compute beyond the tokens, as a share of these. Unpadded ones compute nothing else."""
    padded = tokens = 0
    for unit in ids:
        lengths = [len(before) + len(after) for before, after in unit]
        tokens += sum(lengths)
        padded += sum(len(rows) * max(lengths[row] for row in rows) for rows in even_batches(lengths, pass_tokens))
    return padded / tokens - 1


def through_the_cache(file: Path, units: list[Unit], scores: list[list[ContinuationScore]]) -> None:
    """As training does: keys, a look-up that finds nothing, sums stored in one transaction."""
    cache = ScoreCache(file)
    keys = [pair_key("lm", p, c) for unit in units for p, c in zip(*unit, strict=True)]
    cache.sums(keys)
    rows = [score for some in scores for score in some]
    cache.store("lm", [NewScore(key, score, False) for key, score in zip(keys, rows, strict=True)], 0, len(keys))
    cache.close()


def travel(units: list[Unit], scores: list[list[ContinuationScore]]) -> None:
    """There and back as bytes, without Ray's sockets."""
    for unit, some in zip(units, scores, strict=True):
        pickle.loads(pickle.dumps(unit, 5))  # noqa: S301 - made here
        pickle.loads(pickle.dumps(some, 5))  # noqa: S301


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
    one_by_one = [[pair_token_ids(tokenizer, p, c) for p, c in zip(*unit, strict=True)] for unit in units]
    assert ids == one_by_one, "the two ways have other tokens"
    scores = [[ContinuationScore(np.zeros(len(after), np.float32)) for _, after in unit] for unit in ids]
    folder = tempfile.TemporaryDirectory()
    files = (Path(folder.name) / f"{number}.sqlite" for number in range(10**6))
    parts: dict[str, Callable[[], object]] = {
        "tokenizing, pair by pair (before)": lambda: [
            [pair_token_ids(tokenizer, p, c) for p, c in zip(*unit, strict=True)] for unit in units
        ],
        "tokenizing, unit by unit": lambda: [pairs_token_ids(tokenizer, *unit) for unit in units],
        "grouping and positions (device waits)": lambda: [batch_up(unit) for unit in ids],
        "units in the trainer": lambda: units_of(pairs),
        "the cache: keys, look-up, sums stored": lambda: through_the_cache(next(files), units, scores),
        "transport as bytes": lambda: travel(units, scores),
    }
    print(describe_machine(1))
    print(f"{len(pairs)} pairs in {len(units)} units, {sum(len(b) + len(a) for unit in ids for b, a in unit)} tokens")
    for size in (FEWEST_TOKENS_GPU, MOST_TOKENS_GPU):
        cut = [pairs_token_ids(tokenizer, *unit) for unit in units_of(pairs, size)]
        print(f"padding of a GPU's passes, {len(cut)} units of {size} tokens: {padding(cut, size):.1%}")
    for name, work in parts.items():
        print(f"{name:42} {median_microseconds(work, len(pairs), arguments.rounds):8.1f} us a pair", flush=True)
    folder.cleanup()


if __name__ == "__main__":
    main()
