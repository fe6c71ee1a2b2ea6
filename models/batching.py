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
