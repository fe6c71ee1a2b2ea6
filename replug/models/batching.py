"""Decide which texts are computed together, and how many tokens in one pass of an LM. Imports no torch.

Batches follow from the lengths alone. A unit is scored together by one replica: pairs of similar length, up to
a number of tokens by their bytes, the longest first. Taking units out leaves the others as they were.
A CPU is busy with few tokens, and few rows of similar length are padded little. A GPU wants enough arithmetic in a pass
to hide the cost of its launch. So a GPU's units follow from the LM's size, and never from the number of replicas: a
resumed run may have another number, and its scores stay the same.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from replug.data.tokenizing import num_bytes


def token_budget_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield rows grouped by length, longest first, each group's padded size within the budget (one row at least)."""
    order, descending = _longest_first(lengths)
    yield from _cut(order, _starts(descending, tokens_per_batch))


def even_batches(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Return as few batches as the budget allows, by the smallest budget that needs no more of them.

    The longest rows come first. The size of a batch is its padded size.
    """
    order, descending = _longest_first(lengths)
    fewest, budget = len(_starts(descending, tokens_per_batch)), tokens_per_batch
    least = 0
    while fewest > 1 and least < budget - 1:
        between = (least + budget) // 2
        if len(_starts(descending, between)) <= fewest:
            budget = between
        else:
            least = between
    return list(_cut(order, _starts(descending, budget)))


def _longest_first(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return rows and their lengths, the longest first."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return order, [lengths[row] for row in order]


def _cut(order: list[int], starts: list[int]) -> Iterator[list[int]]:
    return (order[start:end] for start, end in pairwise([*starts, len(order)]))


def _starts(descending: Sequence[int], budget: int) -> list[int]:
    """Return where batches of falling lengths begin; each has a padded size within the budget (one row at least)."""
    starts: list[int] = []
    start = 0
    while start < len(descending):
        starts.append(start)
        start += max(1, budget // max(1, descending[start]))
    return starts


def padded_groups(lengths: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Yield groups of items of one or several rows each, each group's padded size within the budget.

    A group has at least one item. `lengths` holds the lengths of each item's rows.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-max(lengths[item]), item))
    group: list[int] = []
    for item in order:
        num_rows = sum(len(lengths[other]) for other in [*group, item])
        if group and num_rows * max(lengths[group[0]]) > budget:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


LENGTH_STEP = {"cpu": 8, "cuda": 1}  # for a new shape a CPU's library makes a kernel; odd lengths run slower


def padded_length(length: int, most: int, device: str) -> int:
    """Return the tokens that an encoder computes for a text of `length` tokens alone; `most` is its token limit."""
    step = LENGTH_STEP[device]
    return min(-(-length // step) * step, most)


BYTES_PER_TOKEN = 4  # of English and code; where this guess is wrong, it costs padding alone
CHOICE_CHARACTERS = 8  # a continuation so short is most likely one token, as the letters of a question are


def units_of_similar_length(prefixes: Sequence[str], continuations: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Return units, every row once. Lengths are bytes: an LM sorts its unit by tokens.

    Choices after one prefix stay together: the LM reads their prefix once.
    """
    together: dict[str | int, list[int]] = {}
    for row, (prefix, continuation) in enumerate(zip(prefixes, continuations, strict=True)):
        together.setdefault(prefix if len(continuation) <= CHOICE_CHARACTERS else row, []).append(row)
    groups = list(together.values())
    lengths = [num_bytes(prefixes[rows[0]]) + sum(num_bytes(continuations[row]) for row in rows) for rows in groups]
    batches = token_budget_batches(lengths, BYTES_PER_TOKEN * num_tokens)
    return [[row for group in batch for row in groups[group]] for batch in batches]


# Default padded tokens in a pass of an encoder: few enough for a core's cache, or enough to keep a GPU busy.
# A pass with gradient does many times as much work.
ENCODER_TOKENS = {"cpu": 2048, "cuda": 32_768}
ENCODER_TOKENS_WITH_GRADIENT = {"cpu": 8192, "cuda": 32_768}

TOKENS_PER_PASS = 1024  # of an LM on a CPU
PASSES_PER_UNIT = 8  # of a CPU: an LM sorts its unit by length, which bytes only guess

# Matrix products of a unit on a GPU: at half of their peaks a twentieth of a second of an H100, a sixth of an A100.
FLOP_PER_UNIT_GPU = 24e12
FEWEST_TOKENS_GPU, MOST_TOKENS_GPU = 4096, 32_768


def weights_of_layers(layers: int = 1, hidden: int = 1) -> int:
    """Return about how many weights a decoder's layers of this width have; a stand-in's is one of width 1."""
    return 12 * layers * hidden**2


def tokens_per_pass(weights: int, on_gpu: bool, tokens_per_batch: int | None = None) -> int:
    """Return the most tokens of a pass; `tokens_per_batch` is the user's choice. On a GPU a power of two."""
    if tokens_per_batch or not on_gpu:
        return tokens_per_batch or TOKENS_PER_PASS
    wanted = 2 ** round(math.log2(FLOP_PER_UNIT_GPU / (2 * weights)))
    return min(MOST_TOKENS_GPU, max(FEWEST_TOKENS_GPU, wanted))


def tokens_per_unit(weights: int, on_gpu: bool, tokens_per_batch: int | None = None) -> int:
    """Return the tokens of one unit of a replica: a pass on a GPU, several on a CPU."""
    return tokens_per_pass(weights, on_gpu, tokens_per_batch) * (1 if on_gpu else PASSES_PER_UNIT)
