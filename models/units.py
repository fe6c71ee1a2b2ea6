"""Which pairs are worth scoring together: of similar length, a few passes' worth. Follows from the texts alone."""

from collections.abc import Sequence

from replug.models.batching import token_budget_batches
from replug.models.hardware import TOKENS_PER_PASS, TOKENS_PER_PASS_GPU

# What a unit holds: enough passes for an LM to sort by length what bytes only guess, and to be worth a call.
PASSES_PER_UNIT, PASSES_PER_UNIT_GPU = 8, 1
BYTES_PER_TOKEN = 4  # of English and code; a guess, which costs padding where it is wrong and nothing else
CHOICE_CHARACTERS = 8  # a continuation so short is most likely one token, as the letters of a question are


def bytes_per_unit(tokens_per_batch: int | None = None, on_gpu: bool = False) -> int:
    """Size of a unit for passes of so many padded tokens (default: the hardware's)."""
    passes, default = (PASSES_PER_UNIT_GPU, TOKENS_PER_PASS_GPU) if on_gpu else (PASSES_PER_UNIT, TOKENS_PER_PASS)
    return BYTES_PER_TOKEN * passes * (tokens_per_batch or default)


def units_of_similar_length(prefixes: Sequence[str], continuations: Sequence[str], unit_bytes: int) -> list[list[int]]:
    """Every row once. Lengths are bytes: no tokenizer is needed here, and an LM sorts its unit by tokens.

    Choices after one prefix stay together: the LM reads their prefix once.
    """
    together: dict[tuple, list[int]] = {}
    for row, (prefix, continuation) in enumerate(zip(prefixes, continuations, strict=True)):
        is_choice = len(continuation) <= CHOICE_CHARACTERS
        together.setdefault((prefix,) if is_choice else (prefix, row), []).append(row)
    groups = list(together.values())
    lengths = [
        len(prefixes[rows[0]].encode()) + sum(len(continuations[row].encode()) for row in rows) for rows in groups
    ]
    return [[row for group in batch for row in groups[group]] for batch in token_budget_batches(lengths, unit_bytes)]
