"""The data as Lightning sees it: a loader that yields positions, the numbers of steps and of parts of their batches.

The texts of a step follow from seed and step alone (`sampling`), and the pipeline assembles batches ahead of their
step, so Lightning's loop carries only the position.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytorch_lightning as pl
from torch.utils.data import DataLoader, IterableDataset


class Position(NamedTuple):
    """One micro-batch of a step: `part` of `parts`, over which Lightning accumulates the gradient."""

    step: int
    part: int = 0
    parts: int = 1

    @property
    def is_first(self) -> bool:
        return self.part == 0

    @property
    def is_last(self) -> bool:
        return self.part == self.parts - 1


class Positions(IterableDataset):
    """Steps from `first` to `max_steps` - 1. Its length is the whole run's, as Lightning counts on resuming."""

    def __init__(self, first: int, max_steps: int, parts: int) -> None:
        self._first, self._max_steps, self._parts = first, max_steps, parts

    def __iter__(self) -> Iterator[Position]:
        steps = range(self._first, self._max_steps)
        return (Position(step, part, self._parts) for step in steps for part in range(self._parts))

    def __len__(self) -> int:
        return self._max_steps * self._parts


class StepDataModule(pl.LightningDataModule):
    """One epoch of `max_steps` steps in `parts` each, from the trainer's step on when it resumes."""

    def __init__(self, max_steps: int, parts: int = 1) -> None:
        super().__init__()
        self._max_steps, self._parts = max_steps, parts

    def train_dataloader(self) -> DataLoader:
        first = self.trainer.global_step if self.trainer is not None else 0
        return DataLoader(Positions(first, self._max_steps, self._parts), batch_size=None)
