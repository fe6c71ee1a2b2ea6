"""How a scored batch reaches every trainer rank.

Rank 0 alone retrieves and has texts scored; the others receive what it got, so that all train on the same
documents of the same index version, whatever their number. Each takes its own part of the batch.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from replug.configs.errors import Interrupted
from replug.data.records import ScoredBatch
from replug.train.pipeline import BatchPipeline

# Other ranks wait for whatever rank 0 waits for, which has time limits of its own (an LM's answer, a refresh). A rank
# that died is noticed by its connection, at once.
PATIENCE = timedelta(days=30)


class BatchSource(Protocol):
    """Where a rank's batches come from."""

    def take(self, step: int) -> ScoredBatch:
        """The whole batch of a step. Raises Interrupted where rank 0 ends the run."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """Micro-batch `part` of `parts` on `rank` of `ranks`; all of them have the same size."""

    rank: int = 0
    ranks: int = 1
    part: int = 0
    parts: int = 1

    def of(self, batch: ScoredBatch) -> ScoredBatch:
        """The rows of the batch that are this share's."""
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
    """Objects from rank 0 to all. Over gloo: a broadcast that waits must not keep a GPU busy."""

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, message: ScoredBatch | str | None) -> ScoredBatch | str | None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        messages = [message]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]


class BatchSender:
    """Rank 0's: what its pipeline has, sent to the others. After `stop` they raise Interrupted."""

    def __init__(self, pipeline: BatchPipeline) -> None:
        self._pipeline, self._broadcast = pipeline, _Broadcast()

    def take(self, step: int) -> ScoredBatch:
        scored = self._pipeline.take(step)
        self._broadcast(scored)
        return scored

    def stop(self, reason: str) -> None:
        self._broadcast(reason)


class BatchReceiver:
    """The other ranks'."""

    def __init__(self) -> None:
        self._broadcast = _Broadcast()

    def take(self, step: int) -> ScoredBatch:
        message = self._broadcast(None)
        if isinstance(message, ScoredBatch):
            return message
        raise Interrupted(str(message))
