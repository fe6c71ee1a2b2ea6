"""When a run's state is saved; and advice on temperatures before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replug.config.errors import Interrupted, NotFiniteError, RunError
from replug.data.datamodule import Position
from replug.train.callbacks import Checkpointer, entropy_share, half_entropy_temperature, temperature_warning
from replug.train.step_metrics import StepClock


class Writer:
    """Remembers the steps of checkpoints; each is written when it is waited for, if it can be."""

    def __init__(self, is_full: bool = False) -> None:
        self.newest_step, self._is_full, self._step = 4, is_full, 0

    def begin(self, step: int, state: dict, versions: set[int]) -> None:
        self._step = step

    def finish(self) -> bool:
        if self._is_full and self._step:
            raise RunError("step-8.partial cannot be written: No space left on device")
        self.newest_step = max(self.newest_step, self._step)
        return True

    collect = finish

    def versions(self) -> set[int]:
        return {1}


def trainer(step: int) -> Any:
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=step))
    connector = SimpleNamespace(dump_checkpoint=lambda weights_only: {})
    state = {"global_step": step, "max_steps": 24, "should_stop": False}
    return SimpleNamespace(**state, fit_loop=loops, _checkpoint_connector=connector)


def checkpointer(writer: Writer, pruned: list[set[int]], is_restored: bool = True) -> Checkpointer:
    source = SimpleNamespace(versions_in_use=lambda: {2, 3}, prune=pruned.append)
    made = Checkpointer(writer, source, every_steps=4, clock=StepClock())  # type: ignore[arg-type]
    if is_restored:
        made.on_train_start(trainer(0), module())
    return made


def module(value: float = 0.0) -> Any:
    return SimpleNamespace(parameters=lambda: iter([torch.full((3,), value)]))


@pytest.mark.parametrize(
    ("error", "is_restored", "saved"),
    [
        (Interrupted("SIGTERM"), True, 7),
        (RunError("index v2 is gone"), False, 4),  # Lightning knows its step before its index and batches are there
        (NotFiniteError("nan"), True, 4),
        (ValueError("a mistake of ours"), True, 4),
    ],
)
def test_a_run_that_ends_early_saves_its_steps_if_they_can_be_trusted(error, is_restored, saved, capsys):
    writer, pruned = Writer(), []
    checkpointer(writer, pruned, is_restored).on_exception(trainer(7), module(), error)
    assert writer.newest_step == saved
    if saved == 7:
        assert pruned[-1] == {1, 2, 3}, "versions in use, and those of checkpoints"
        assert "saved step 7: the same command goes on from there" in capsys.readouterr().err


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint():
    writer = Writer()
    with pytest.raises(NotFiniteError, match="the weights after 8 steps"):
        checkpointer(writer, []).on_train_batch_end(trainer(8), module(torch.nan), None, Position(7), 7)
    assert writer._step == 0


def test_on_a_full_disk_the_checkpoint_that_counts_is_named(capsys):
    checkpointer(Writer(is_full=True), []).on_exception(trainer(8), module(), RunError("full"))
    assert "step 8 is not saved, step 4 is: step-8.partial cannot be written" in capsys.readouterr().err


SCORES = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("temperature", "shape"), [(1e4, "nearly uniform"), (1e-4, "nearly one-hot")])
def test_a_warning_names_the_distribution_the_key_its_value_and_one_of_half_the_entropy(temperature, shape) -> None:
    better = half_entropy_temperature(SCORES)
    assert entropy_share(SCORES, better) == pytest.approx(0.5, abs=1e-6)
    assert half_entropy_temperature(SCORES * 1e3) == pytest.approx(better * 1e3, rel=1e-6)
    assert temperature_warning("Q", "loss.beta", SCORES, better) is None
    text = temperature_warning("Q", "loss.beta", SCORES, temperature)
    assert text.startswith(f"Q is {shape} at loss.beta={temperature:g}: ") and f"loss.beta={better:.2g}" in text
    assert half_entropy_temperature(torch.tensor([[1.0] * 4, [-3.0] * 4])) is None  # equal scores
