"""What each device did meanwhile: `device_use.jsonl`, and the metrics `devices/...`. `device_rows` reads the file.

A row of the file is of some steps: the last of them, their seconds, and of those the busy ones by device and role. Work
counts in the steps in which its result arrived. So a file of vectors that took longer than these steps is more than
they have room for, and the shares of a long run are right where those of a single step are not. Roles that take turns
on a GPU are each busy until their work is done, with the turns of the others in it: their shares may add up above 1.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from replug.cluster.device_use import USE, Busy, BusySeconds, DeviceUse, add_seconds
from replug.data.datamodule import Position
from replug.train.callbacks import JsonLinesLogger, append_row

ROWS = 100  # of a run, at least: few enough to look at, and small where there are many devices
RankDevices = Callable[[], Sequence[tuple[str, ...]]]  # of each rank, rank 0's first


class DeviceShares(pl.Callback):
    """Adds up who worked where, and writes it every so many steps. Rank 0's; its state is what is not written yet.

    All ranks are taken to be at work as long as rank 0 trains, which ends with the slowest; it alone encodes queries.
    """

    def __init__(self, path: Path, max_steps: int, ranks: RankDevices, use: DeviceUse = USE) -> None:
        self._path, self._ranks, self._use = path, ranks, use
        self._every = max(1, max_steps // ROWS)
        self._seconds = 0.0
        self._busy: BusySeconds = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._use.take()  # of before the first step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        self._add({name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("time/")})
        if (batch.step + 1) % self._every == 0 or batch.step + 1 == trainer.max_steps:
            self._write(trainer, batch.step)

    def state_dict(self) -> dict[str, Any]:
        """A copy, since a checkpoint is written while the next steps go on."""
        return {"seconds": self._seconds, "busy": deepcopy(self._busy)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds, self._busy = state_dict["seconds"], deepcopy(state_dict["busy"])

    def _add(self, times: dict[str, float]) -> None:
        for rank, devices in enumerate(self._ranks()):
            encoded = times["time/retrieve_seconds"] if rank == 0 else 0.0
            self._use.note("train", Busy(times["time/train_seconds"] + encoded, devices))
        self._seconds += times["time/step_seconds"]
        for device, role, seconds in _flat(self._use.take()):
            add_seconds(self._busy, device, role, seconds)

    def _write(self, trainer: pl.Trainer, step: int) -> None:
        append_row(self._path, {"step": step, "seconds": self._seconds, "busy": self._busy})
        shares = {f"devices/{device}/{role}": busy / self._seconds for device, role, busy in _flat(self._busy)}
        for logger in trainer.loggers:
            if not isinstance(logger, JsonLinesLogger):  # whose rows are of one step each
                logger.log_metrics(shares, step)
        self._seconds, self._busy = 0.0, {}


def _flat(busy: BusySeconds) -> Iterable[tuple[str, str, float]]:
    return [(device, role, seconds) for device, roles in busy.items() for role, seconds in roles.items()]
