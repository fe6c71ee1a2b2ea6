"""The inputs of a call's passes, and which rows of the call are scored from each.

Rows with the same prefix and continuations of one token, such as the letters of a multiple-choice question, form one
group: all are predicted from the prefix's last position, so their prefix is read once. Every other row is a group of
its own. The groups follow from the call's texts alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replug.models.pair_tokens import PairIds


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """One input of a pass: a prefix with its continuation, or a prefix with alternatives of one token each.

    `rows` are the call's, one for each continuation.
    """

    prefix: list[int]
    continuations: list[list[int]]
    rows: list[int]

    @property
    def ids(self) -> list[int]:
        """The input. Alternatives are predicted and are no part of it."""
        return self.prefix + self.continuations[0] if len(self.rows) == 1 else self.prefix

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + (len(self.continuations[0]) if len(self.rows) == 1 else 0)

    @property
    def pairs(self) -> list[PairIds]:
        return [(self.prefix, continuation) for continuation in self.continuations]

    def without(self, num_tokens: int) -> "PrefixGroup":
        """The group less the first `num_tokens` of its prefix, whose keys and values are kept elsewhere."""
        return replace(self, prefix=self.prefix[num_tokens:])


def prefix_groups(pairs: Sequence[PairIds]) -> list[PrefixGroup]:
    """Every row once; groups are in the order of their first rows."""
    together: dict[tuple, list[int]] = {}
    for row, (prefix, continuation) in enumerate(pairs):
        key = (tuple(prefix),) if len(continuation) == 1 else (tuple(prefix), row)
        together.setdefault(key, []).append(row)
    return [PrefixGroup(pairs[rows[0]][0], [pairs[row][1] for row in rows], rows) for rows in together.values()]
