"""The Lightning side of the data: a loader that yields step numbers.

Which texts make up a step is a pure function of seed and step (`sampler`), and batches are put together
ahead of their step by the pipeline, so all that Lightning's loop has to carry is the step itself.
"""

from collections.abc import Iterator

import pytorch_lightning as pl
from torch.utils.data import DataLoader, IterableDataset


class Steps(IterableDataset):
    """Steps from `first` to `max_steps` - 1. Its length is the whole run's, as Lightning counts on resuming."""

    def __init__(self, first: int, max_steps: int) -> None:
        self._first, self._max_steps = first, max_steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first, self._max_steps))

    def __len__(self) -> int:
        return self._max_steps


class StepDataModule(pl.LightningDataModule):
    """One epoch of `max_steps` steps, begun at the trainer's own step when it resumes."""

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        self._max_steps = max_steps

    def train_dataloader(self) -> DataLoader:
        first = self.trainer.global_step if self.trainer is not None else 0
        return DataLoader(Steps(first, self._max_steps), batch_size=None)
