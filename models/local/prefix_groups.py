"""What the passes of a call read, and which rows of the call are scored from each.

Rows with the same prefix and continuations of one token are all predicted from the prefix's last position: the letters
of a multiple-choice question. Their prefix is read once. What is read together follows from the call's texts alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replug.models.pair_tokens import PairIds


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """One input of a pass: a prefix with its continuation, or a prefix that several tokens may follow.

    `rows` are the call's, one for each continuation.
    """

    prefix: list[int]
    continuations: list[list[int]]
    rows: list[int]

    @property
    def ids(self) -> list[int]:
        """What is read. Tokens that are alternatives to each other are predicted and not read."""
        return self.prefix + self.continuations[0] if len(self.rows) == 1 else self.prefix

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + (len(self.continuations[0]) if len(self.rows) == 1 else 0)

    @property
    def pairs(self) -> list[PairIds]:
        return [(self.prefix, continuation) for continuation in self.continuations]

    def without(self, num_tokens: int) -> "PrefixGroup":
        """The prefix group after the first `num_tokens` of its prefix, which something else has read."""
        return replace(self, prefix=self.prefix[num_tokens:])


def prefix_groups(pairs: Sequence[PairIds]) -> list[PrefixGroup]:
    """Every row once, in the order of each prefix group's first row."""
    together: dict[tuple, list[int]] = {}
    for row, (prefix, continuation) in enumerate(pairs):
        key = (tuple(prefix),) if len(continuation) == 1 else (tuple(prefix), row)
        together.setdefault(key, []).append(row)
    return [PrefixGroup(pairs[rows[0]][0], [pairs[row][1] for row in rows], rows) for rows in together.values()]
