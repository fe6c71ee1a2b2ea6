"""Which training texts make up which step: a pure function of seed and step, so resuming needs no state."""

import numpy as np


class QuerySampler:
    """Endless passes over the training texts, each in its own order; batches run on over the passes' ends."""

    def __init__(self, num_queries: int, batch_size: int, seed: int) -> None:
        self.num_queries = num_queries
        self.batch_size = batch_size
        self.seed = seed

    def rows(self, step: int) -> np.ndarray:
        """Rows [B] of the training texts for a step, counted from 0."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, offsets = positions // self.num_queries, positions % self.num_queries
        orders = {epoch: self._order(epoch) for epoch in np.unique(epochs)}
        return np.array([orders[epoch][offset] for epoch, offset in zip(epochs, offsets, strict=True)])

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, int(epoch)]).permutation(self.num_queries)
