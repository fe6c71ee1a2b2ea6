"""Batches of similar length: what is computed together follows from the lengths alone."""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def token_budget_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Rows grouped by length, longest first, each group's padded size within the budget (one row at least)."""
    order, descending = _longest_first(lengths)
    yield from _cut(order, _starts(descending, tokens_per_batch))


def even_batches(lengths: Sequence[int], tokens_per_batch: int, padded: bool = True) -> list[list[int]]:
    """As few as the budget makes, by the smallest budget that makes no more: the last is no remnant.

    Longest first. A batch's size is its padded one, or the sum of its lengths.
    """
    order, descending = _longest_first(lengths)
    find_starts = _starts if padded else _packed_starts
    fewest, budget = len(find_starts(descending, tokens_per_batch)), tokens_per_batch
    least = 0
    while fewest > 1 and least < budget - 1:
        between = (least + budget) // 2
        if len(find_starts(descending, between)) <= fewest:
            budget = between
        else:
            least = between
    return list(_cut(order, find_starts(descending, budget)))


def _longest_first(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows, and their lengths."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return order, [lengths[row] for row in order]


def _cut(order: list[int], starts: list[int]) -> Iterator[list[int]]:
    return (order[start:end] for start, end in pairwise([*starts, len(order)]))


def _starts(descending: Sequence[int], budget: int) -> list[int]:
    """Where batches of falling lengths begin, each of a padded size within the budget (one row at least)."""
    starts: list[int] = []
    start = 0
    while start < len(descending):
        starts.append(start)
        start += max(1, budget // max(1, descending[start]))
    return starts


def _packed_starts(lengths: Sequence[int], budget: int) -> list[int]:
    """Where batches begin, each of a sum within the budget (one row at least)."""
    starts: list[int] = []
    size = 0
    for row, length in enumerate(lengths):
        if not starts or size + length > budget:
            starts.append(row)
            size = 0
        size += length
    return starts


def padded_groups(lengths: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Items of one or several rows each, those with the longest first, each group's padded size within the budget.

    One item at least; `lengths` are those of each item's rows.
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


def within_budget(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Rows in their order, as many together as the budget holds (one row at least)."""
    group: list[int] = []
    for row, size in enumerate(sizes):
        if group and sum(sizes[other] for other in group) + size > budget:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
