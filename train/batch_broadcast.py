"""How a scored batch reaches every trainer rank.

Rank 0 alone retrieves and has texts scored. It sends each scored batch to the other ranks. So all ranks train on the
same documents of the same index version, whatever their number. Each rank takes its own share of the batch.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from replug.configs.errors import Interrupted
from replug.data.records import ScoredBatch
from replug.train.pipeline import BatchPipeline

# Other ranks wait as long as rank 0 waits for the LM or for a refresh, and these have time limits of their own. A rank
# that died is noticed by its connection, at once.
PATIENCE = timedelta(days=30)


class BatchSource(Protocol):
    """Where a rank gets its batches."""

    def take(self, step: int) -> ScoredBatch:
        """The whole batch of a step. Raises Interrupted where rank 0 ends the run."""
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


class _Broadcast:
    """Sends an object from rank 0 to all ranks. Over gloo: a broadcast that waits must not keep a GPU busy."""

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, message: ScoredBatch | str | None) -> ScoredBatch | str | None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        messages = [message]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]


class BatchSender:
    """Rank 0's source: takes a batch from the pipeline and sends it to the other ranks."""

    def __init__(self, pipeline: BatchPipeline) -> None:
        self._pipeline, self._broadcast = pipeline, _Broadcast()

    def take(self, step: int) -> ScoredBatch:
        scored = self._pipeline.take(step)
        self._broadcast(scored)
        return scored

    def stop(self, reason: str) -> None:
        """The other ranks raise Interrupted with this reason instead of getting a batch."""
        self._broadcast(reason)


class BatchReceiver:
    """Every other rank's source: receives what rank 0 sends."""

    def __init__(self) -> None:
        self._broadcast = _Broadcast()

    def take(self, step: int) -> ScoredBatch:
        message = self._broadcast(None)
        if isinstance(message, ScoredBatch):
            return message
        raise Interrupted(str(message))
