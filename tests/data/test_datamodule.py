"""The loader yields the steps that are left, and the parts of their batches."""

from types import SimpleNamespace

from replug.data.datamodule import Position, Positions, StepDataModule


def test_steps_begin_where_the_run_goes_on_and_count_the_whole_run():
    positions = Positions(first=3, max_steps=7, parts=1)
    assert [position.step for position in positions] == [3, 4, 5, 6]
    assert [position.step for position in positions] == [3, 4, 5, 6]  # and again
    assert len(positions) == 7


def test_a_step_of_several_parts_comes_part_by_part():
    positions = list(Positions(first=1, max_steps=3, parts=2))
    assert positions == [Position(1, 0, 2), Position(1, 1, 2), Position(2, 0, 2), Position(2, 1, 2)]
    assert [position.is_first for position in positions] == [True, False, True, False]
    assert [position.is_last for position in positions] == [False, True, False, True]
    assert len(Positions(first=1, max_steps=3, parts=2)) == 6


def test_the_loader_yields_bare_positions_from_the_trainers_own_step():
    module = StepDataModule(max_steps=5)
    assert list(module.train_dataloader()) == [Position(step) for step in range(5)]
    module.trainer = SimpleNamespace(global_step=3)
    assert list(module.train_dataloader()) == [Position(3), Position(4)]
