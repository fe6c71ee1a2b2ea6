"""How a scored batch reaches every trainer rank.

Rank 0 alone retrieves and has texts scored. It sends each scored batch to the other ranks. So all ranks train on the
same documents of the same index version, whatever their number. Each rank takes its own share of the batch.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import pytorch_lightning as pl
import torch.distributed as dist

from replug.data.records import ScoredBatch

# Other ranks wait for a batch as long as rank 0 waits for the LM or for a refresh, and these have time limits of their
# own. A rank that died is noticed by its connection, one that hangs by its heartbeat.
BATCH_PATIENCE = timedelta(days=30)

# All other waits between ranks: to meet at the start, for the gradient, while rank 0 copies a checkpoint's state. All
# ranks do the same work between them, but for compiling and for loading from a slow disk.
COLLECTIVE_PATIENCE = timedelta(minutes=10)


class BatchSource(Protocol):
    """Where a rank gets its batches."""

    def take(self, step: int) -> ScoredBatch:
        """The whole batch of a step."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank trains on at once: micro-batch `part` of `parts` on `rank` of `ranks`. All are of one size."""

    rank: int = 0
    ranks: int = 1
    part: int = 0
    parts: int = 1

    def of(self, batch: ScoredBatch) -> ScoredBatch:
        """The rows of the batch that belong to this share."""
        size = len(batch.num_tokens) // (self.ranks * self.parts)
        begin = (self.rank * self.parts + self.part) * size
        rows = slice(begin, begin + size)
        found = batch.retrieved
        retrieved = replace(
            found,
            query_rows=found.query_rows[rows],
            doc_rows=found.doc_rows[rows],
            similarities=found.similarities[rows],
        )
        return ScoredBatch(retrieved, batch.sum_logprobs[rows], batch.num_tokens[rows])


class BatchChannel(pl.Callback):
    """A `BatchSource` that carries what `source` gives on rank 0 to all ranks; the others have no source.

    Over gloo: a broadcast that waits must not keep a GPU busy. Opened where the ranks have just met: rank 0 may then
    take hours to its first batch.
    """

    def __init__(self, source: BatchSource | None = None) -> None:
        self._source, self._group = source, None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A collective."""
        self._group = dist.new_group(backend="gloo", timeout=BATCH_PATIENCE)

    def take(self, step: int) -> ScoredBatch:
        messages = [self._source.take(step) if self._source is not None else None]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        assert messages[0] is not None
        return messages[0]
