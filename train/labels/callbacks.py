"""What is periodic in a training on labels, as Lightning callbacks: the step boundary, looks at development texts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from replug.data.datamodule import Position
from replug.data.progress import Progress
from replug.train.labels.dev import DevLook
from replug.train.step_clock import StepClock


class LabelBoundary(pl.Callback):
    """Before a step: `check`, which raises what is to end the run. After it: its time, and a line of progress."""

    def __init__(self, max_steps: int, clock: StepClock, check: Callable[[], None]) -> None:
        self._max_steps, self._clock, self._check = max_steps, clock, check
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = Progress("training on labels", self._max_steps, done=trainer.global_step)
        self._clock.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if batch.is_first:
            self._check()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        assert self._progress is not None
        seconds = self._clock.read()
        pl_module.log_dict({f"time/{name}_seconds": seconds[f"time/{name}_seconds"] for name in ("step", "checkpoint")})
        self._progress.advance(note=f"loss {trainer.callback_metrics['train/loss']:.4f}")


@dataclass(frozen=True, slots=True)
class LookRules:
    """When development texts are looked at, which number counts, and when it has not fallen for too long."""

    every_steps: int
    measure: str  # bpb or kl
    patience: int | None


class DevWatch(pl.Callback):
    """Looks at the development texts before the first step and every so many; keeps the best weights; may stop.

    Its state in a checkpoint is the best look, the last one, and how many came to nothing since.
    """

    def __init__(
        self,
        look: Callable[[int], DevLook],
        keep: Callable[[Callable[[Path], None], DevLook], None],
        rules: LookRules,
    ) -> None:
        self._look_at, self._keep, self._rules = look, keep, rules
        self.first: DevLook | None = None
        self.best: DevLook | None = None
        self._last: DevLook | None = None
        self._in_vain = 0

    @property
    def is_over(self) -> bool:
        """Whether training ends here."""
        return self._rules.patience is not None and self._in_vain >= self._rules.patience

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was resumed has looked already."""
        if self.best is None:
            self._look(trainer, pl_module)
        trainer.should_stop = self.is_over

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        step = trainer.global_step
        if step % self._rules.every_steps == 0 or step == trainer.max_steps:
            self._look(trainer, pl_module)
            trainer.should_stop = self.is_over
        assert self._last is not None
        # At every step: Lightning would repeat a value that is logged now and then.
        pl_module.log_dict({f"dev/{name}": float(value) for name, value in asdict(self._last).items()})

    def state_dict(self) -> dict[str, Any]:
        looks = {"first": self.first, "best": self.best, "last": self._last}
        return {name: asdict(look) for name, look in looks.items() if look is not None} | {"in_vain": self._in_vain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.best, self._last = (DevLook(**state_dict[name]) for name in ("first", "best", "last"))
        self._in_vain = state_dict["in_vain"]

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        look = self._last = self._look_at(trainer.global_step)
        self.first = self.first or look
        if self.best is None or self._number(look) < self._number(self.best):
            self.best, self._in_vain = look, 0
            self._keep(module.encoder.save, look)  # type: ignore[union-attr, arg-type] # the encoder of the module
        else:
            self._in_vain += 1

    def _number(self, look: DevLook) -> float:
        number: float = getattr(look, self._rules.measure)
        return number
