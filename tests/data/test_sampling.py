"""Which texts make up a step, and the positions that Lightning counts."""

from types import SimpleNamespace

import numpy as np
import pytest

from replug.data.datamodule import Position, Positions, StepDataModule
from replug.data.sampling import QuerySampler


def drawn(num_queries: int, batch_size: int, seed: int, steps: int) -> list[int]:
    sampler = QuerySampler(num_queries, batch_size, seed)
    return np.concatenate([sampler.rows(step) for step in range(steps)]).tolist()


def test_rows_follow_from_seed_and_step_whatever_was_asked_before():
    fresh, used = QuerySampler(10, 4, seed=7), QuerySampler(10, 4, seed=7)
    for step in (5, 0, 9, 2):
        used.rows(step)
    assert [fresh.rows(step).tolist() for step in range(10)] == [used.rows(step).tolist() for step in range(10)]


@pytest.mark.parametrize(("num_queries", "batch_size"), [(12, 4), (10, 4), (7, 3), (3, 8), (1, 2)])
def test_each_pass_takes_every_text_once_though_batches_run_over_its_end(num_queries, batch_size):
    rows = drawn(num_queries, batch_size, seed=0, steps=20)
    passes = [rows[i : i + num_queries] for i in range(0, len(rows) - num_queries + 1, num_queries)]
    assert len(passes) >= 2
    assert all(sorted(one) == list(range(num_queries)) for one in passes)


def test_steps_begin_where_the_run_goes_on_and_count_the_whole_run():
    positions = Positions(first=3, max_steps=7, parts=1)
    assert [position.step for position in positions] == [3, 4, 5, 6]
    assert [position.step for position in positions] == [3, 4, 5, 6]  # and again
    assert len(positions) == 7


def test_the_loader_yields_bare_positions_from_the_trainers_own_step():
    module = StepDataModule(max_steps=5)
    assert list(module.train_dataloader()) == [Position(step) for step in range(5)]
    module.trainer = SimpleNamespace(global_step=3)
    assert list(module.train_dataloader()) == [Position(3), Position(4)]
