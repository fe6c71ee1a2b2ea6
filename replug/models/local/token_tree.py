"""Inputs that begin alike, as one row of tokens: each token stands in it once, and sees those before it in its input.

Few questions about one passage are the case: the passage is read once, and what is asked of it stands behind it side
by side. A token of the row is a node of a tree, a path from the root is an input, and a mask lets a node see its own
path and nothing else (the tree attention of SpecInfer). Pure of models. N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from replug.models.pair_tokens import PairIds

# Inputs that share fewer tokens are rows of their own: a wider row costs more attention than these tokens save.
MIN_SHARED_TOKENS = 32


@dataclass(slots=True)
class TokenTree:
    """Tokens, each with the place of the one before it in its inputs (-1 for a first) and its distance from the root.

    `rows` are those of a call that are scored from this tree, and `predicted_from` the places [T] whose logits give
    each one's continuation, with the tokens that are wanted in `targets`.
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    predicted_from: list[list[int]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    _places: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def add(self, row: int, pair: PairIds) -> None:
        """Score a continuation after its prefix, which has a token at least. Its last token need not be read."""
        before, after = pair
        place, path = -1, []
        for token in [*before, *after[:-1]]:
            place = self._place(place, token)
            path.append(place)
        self.rows.append(row)
        self.predicted_from.append(path[len(before) - 1 :])
        self.targets.append(after)

    def sees(self) -> np.ndarray:
        """Bool [N, N]: whether the node of a row sees the one of a column, which is itself or before it on its path."""
        seen = np.eye(self.num_tokens, dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen

    def _place(self, parent: int, token: int) -> int:
        found = self._places.get((parent, token))
        if found is None:
            found = self._places[parent, token] = len(self.ids)
            self.ids.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return found


def token_trees(pairs: Sequence[PairIds], num_begun: int = 0) -> list[TokenTree]:
    """Every row of a call once: rows that begin with the same `MIN_SHARED_TOKENS` are in one tree, others apart.

    These tokens are counted behind the first `num_begun`, which all rows may have in common.
    """
    trees: dict[tuple[int, ...], TokenTree] = {}
    for row, pair in enumerate(pairs):
        beginning = tuple([*pair[0], *pair[1]][: num_begun + MIN_SHARED_TOKENS])
        trees.setdefault(beginning, TokenTree()).add(row, pair)
    return list(trees.values())
