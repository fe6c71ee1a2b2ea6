"""Simulations of roles on the same GPUs, small enough to work out by hand."""

from dataclasses import replace

import pytest

from replug.config.refresh_policy import AtLag
from replug.planning.pace import StepSeconds
from replug.planning.shared_gpus import CROWDED, simulate_shared
from replug.planning.simulate import Durations, ScoringSeconds, SharedGPUs, SimulatedRun, StageSeconds
from replug.planning.workload import HeldOut, Lengths, Shape, StepShape

NEVER = 10_000
SHAPE = Shape(
    StepShape(batch_size=2, k=2, depth=0),
    Lengths(context=1, continuation=1, document=1),
    num_documents=1,
    num_queries=1,
    refresh=AtLag(every_steps=NEVER, lag_steps=5, max_age_steps=3 * NEVER, max_steps=20),
    heldout=HeldOut(windows=0, k=0),
    checkpoint_every=NEVER,
)
DURATIONS = Durations(
    encode=0.0,
    search=0.0,
    scoring=ScoringSeconds(unit=3.0, units=2),
    train=4.0,
    build=10.0,
    stages=StageSeconds(first_build=100.0, last_build=50.0),
    files=4,
)
TWO = SharedGPUs(score=(0, 1), embed=(0, 1), train=(0,), search=(0, 1))


def test_all_gpus_embed_while_nothing_else_runs() -> None:
    simulated = simulate_shared(SHAPE, DURATIONS, TWO)
    assert simulated.times.training_began == pytest.approx(100)
    assert simulated.busy("embed") == pytest.approx(2 * (100 + 50))


def test_at_depth_zero_nothing_is_shared_and_a_step_is_the_sum_of_its_parts() -> None:
    simulated = simulate_shared(SHAPE, DURATIONS, TWO)
    assert simulated.step_ends == [pytest.approx(100 + 7 * step) for step in range(1, 21)]


def test_a_scorer_beside_the_trainer_is_slower_and_takes_fewer_units() -> None:
    """A step is 12 s of scoring and 4 of training: two GPUs that are never idle take 8, and a little for sharing."""
    shape = replace(SHAPE, step=replace(SHAPE.step, depth=3))
    simulated = simulate_shared(shape, replace(DURATIONS, scoring=ScoringSeconds(1.0, 12)), TWO)
    pace = (simulated.step_ends[-5] - simulated.step_ends[5]) / 10
    assert 8.0 <= pace <= 8.0 / CROWDED + 1e-6
    assert simulated.busy("score") == pytest.approx(20 * 12)
    assert simulated.busy("train") == pytest.approx(20 * 4)


def test_a_step_ends_with_its_slowest_rank() -> None:
    gpus = SharedGPUs(score=(0,), embed=(0, 1), train=(0, 1))
    shape = replace(SHAPE, step=replace(SHAPE.step, depth=1))
    simulated = simulate_shared(shape, replace(DURATIONS, scoring=ScoringSeconds(4.0, 1)), gpus)
    # The next batch is scored on rank 0's GPU, at half the speed: rank 1 waits.
    assert simulated.step_ends[5] - simulated.step_ends[4] == pytest.approx(8 / CROWDED)


def test_a_late_refresh_has_the_gpus_for_itself() -> None:
    policy = replace(SHAPE.refresh, every_steps=8, lag_steps=1)
    simulated = simulate_shared(replace(SHAPE, refresh=policy), DURATIONS, TWO)
    # 20 s of work on two GPUs beside one step of 7 s, which ends: what is left of it nobody slows down.
    assert [(r.step, r.adopted_step) for r in simulated.index.refreshes] == [(8, 9), (16, 17)]
    first = simulated.index.refreshes[0]
    assert first.ready is not None and 10 < first.ready - first.began < 10 + 8 / CROWDED


def refreshed(**changed: int) -> tuple[Shape, Durations]:
    policy = AtLag(every_steps=300, lag_steps=100, max_age_steps=NEVER, max_steps=1600)
    shape = replace(SHAPE, refresh=policy, step=replace(SHAPE.step, depth=2))
    return shape, replace(DURATIONS, scoring=ScoringSeconds(1.0, 12), build=300.0, files=60, **changed)


def key_figures(simulated: SimulatedRun) -> list[float]:
    last = [refresh.adopted or 0.0 for refresh in simulated.index.refreshes]
    return [simulated.times.wall, *(simulated.busy(role) for role in ("score", "embed", "train")), *last]


def test_jumping_over_what_repeats_changes_nothing() -> None:
    shape, durations = refreshed()
    quick, whole = (simulate_shared(shape, durations, TWO, jumps) for jumps in (True, False))
    assert key_figures(quick) == pytest.approx(key_figures(whole), rel=0.005)
    assert len(quick.step_ends) == len(whole.step_ends) == 1600
    assert quick.step_ends == pytest.approx(whole.step_ends, rel=0.01)
    assert [(r.step, r.adopted_step) for r in quick.index.refreshes] == [
        (r.step, r.adopted_step) for r in whole.index.refreshes
    ]


def test_the_pace_that_a_layout_is_chosen_by() -> None:
    step = StepSeconds(score=14.0, embed=2.0, train=0.8, encode=0.0)
    apart = {"train": 1.0, "score": 7.0, "index": 7.0}
    assert step.pace(apart, 8, 8) == pytest.approx(16 / 7)
    everywhere = {"train": 2.0, "score": 8.0, "index": 8.0}
    assert step.pace(everywhere, 8, 8) == pytest.approx(16.8 / 8)
    slow = replace(step, train=8.0)  # four seconds for each rank, at half the speed
    assert step.pace(everywhere, 8, 8) < 8 < slow.pace(everywhere, 8, 8)
    late = replace(step, lag=0.01)  # seven GPUs build while the eighth waits
    assert late.pace(apart, 8, 8) > step.pace(apart, 8, 8)
