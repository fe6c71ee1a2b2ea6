"""The loader yields the steps that are left."""

from types import SimpleNamespace

from data.datamodule import StepDataModule, Steps


def test_steps_begin_where_the_run_goes_on_and_count_the_whole_run():
    steps = Steps(first=3, max_steps=7)
    assert list(steps) == [3, 4, 5, 6]
    assert list(steps) == [3, 4, 5, 6]  # and again
    assert len(steps) == 7


def test_a_finished_run_has_no_steps_left():
    assert list(Steps(first=7, max_steps=7)) == []


def test_the_loader_yields_bare_step_numbers_from_the_trainers_own():
    module = StepDataModule(max_steps=5)
    assert list(module.train_dataloader()) == [0, 1, 2, 3, 4]
    module.trainer = SimpleNamespace(global_step=3)
    assert list(module.train_dataloader()) == [3, 4]
