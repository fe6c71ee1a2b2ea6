"""Batches of similar length: what is computed together follows from the lengths alone."""

from collections.abc import Iterator, Sequence


def token_budget_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Rows grouped by length, longest first, each group's padded size within the budget (one row at least)."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    start = 0
    while start < len(order):
        size = max(1, tokens_per_batch // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


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
