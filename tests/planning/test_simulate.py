"""Simulations small enough to work out by hand."""

from dataclasses import replace

import pytest
import simpy

from replug.config.refresh_policy import AtLag, RefreshPolicy, WhenReady
from replug.planning.sharing import Processor
from replug.planning.simulate import (
    DeviceAllocation,
    Durations,
    Place,
    ScoringSeconds,
    SimulatedRun,
    StageSeconds,
    simulate,
)
from replug.planning.workload import HeldOut, Lengths, Shape, StepShape

NEVER = 10_000
POLICY = AtLag(every_steps=NEVER, lag_steps=5, max_age_steps=3 * NEVER, max_steps=20)
SHAPE = Shape(
    StepShape(batch_size=2, k=2, depth=0),
    Lengths(context=1, continuation=1, document=1),
    num_documents=1,
    num_queries=1,
    refresh=POLICY,
    heldout=HeldOut(windows=0, k=0),
    checkpoint_every=NEVER,
)
SCORING = ScoringSeconds(unit=3.0, units=1)
STAGES = StageSeconds(first_build=100.0, last_build=50.0)
DURATIONS = Durations(encode=1.0, search=2.0, scoring=SCORING, train=4.0, build=10.0, stages=STAGES)


def run(shape: Shape = SHAPE, durations: Durations = DURATIONS, replicas: int = 1) -> SimulatedRun:
    return simulate(shape, durations, DeviceAllocation(replicas))


def ahead(depth: int) -> Shape:
    return replace(SHAPE, step=replace(SHAPE.step, depth=depth))


def refreshed(policy: RefreshPolicy) -> Shape:
    return replace(SHAPE, refresh=replace(policy, max_steps=POLICY.max_steps))


def with_units(units: int) -> Durations:
    """Of a run in which only scoring takes time."""
    return replace(DURATIONS, scoring=replace(SCORING, units=units), encode=0.0, search=0.0, train=0.0)


def test_at_depth_zero_a_step_is_the_sum_of_its_parts() -> None:
    simulated = run()
    assert simulated.step_ends == [pytest.approx(100 + 10 * step) for step in range(1, 21)]
    assert simulated.times.wall == 100 + 200 + 50
    assert simulated.waits["scores"] == 20 * (2 + 3)


def test_at_depth_two_the_slower_of_lm_and_trainer_sets_the_pace() -> None:
    slow_lm = run(ahead(2), replace(DURATIONS, scoring=replace(SCORING, unit=9.0)))
    assert slow_lm.step_ends[10] - slow_lm.step_ends[9] == pytest.approx(9.0)
    slow_trainer = run(ahead(2), replace(DURATIONS, train=20.0))
    assert slow_trainer.step_ends[10] - slow_trainer.step_ends[9] == pytest.approx(21.0)  # with the queries' encoding
    assert slow_trainer.waits["scores"] == pytest.approx(1 + 2 + 3 - 3)  # the first batch, less the encodings


def test_the_first_step_waits_for_its_own_batch_and_for_none_behind_it() -> None:
    simulated = run(ahead(2), replace(DURATIONS, search=0.0))
    # Three queries' encodings of a second, one after the other; the LM has the first batch after 1 + 3 s.
    assert simulated.step_ends[0] == pytest.approx(100 + 1 + 3 + 4)
    assert simulated.waits["scores"] == pytest.approx(1)


def test_units_of_a_batch_are_spread_over_replicas() -> None:
    durations = with_units(5)
    assert run(durations=durations, replicas=1).step_ends[0] == 100 + 15
    assert run(durations=durations, replicas=2).step_ends[0] == 100 + 9
    assert run(durations=durations, replicas=5).step_ends[0] == 100 + 3
    assert run(durations=durations, replicas=50).step_ends[0] == 100 + 3


def test_replicas_go_on_with_the_next_batch_where_one_leaves_some_free() -> None:
    simulated = run(ahead(3), with_units(3), replicas=2)
    assert simulated.step_ends[-1] == pytest.approx(100 + 20 * 3 * 3 / 2, abs=3)


def test_a_refresh_is_waited_for_at_its_lag_and_no_earlier() -> None:
    simulated = run(refreshed(AtLag(8, 3, NEVER, NEVER)), replace(DURATIONS, build=37.0))
    # Refreshes start at 8 and 16; steps last 10 s, so a build of 37 s is 7 s late at its adoption.
    assert [(r.step, r.adopted_step) for r in simulated.index.refreshes] == [(8, 11), (16, 19)]
    assert simulated.waits["index"] == pytest.approx(2 * 7)
    assert simulated.index.skipped == []
    assert simulated.index.max_lag_steps == 11


def test_a_synchronous_refresh_is_waited_for_at_once() -> None:
    simulated = run(refreshed(AtLag(8, 0, NEVER, NEVER)))
    assert simulated.waits["index"] == pytest.approx(2 * 10)
    assert [r.adopted_step for r in simulated.index.refreshes] == [8, 16]
    assert simulated.index.max_lag_steps == 8


def test_a_refresh_due_while_another_is_under_way_is_skipped() -> None:
    simulated = run(refreshed(WhenReady(4, 2, NEVER, NEVER)), replace(DURATIONS, build=65.0))
    # Begun at step 4, ready 6.5 steps later, adopted at 11; step 8's is skipped, 12's is begun, 16's skipped.
    assert [(r.step, r.adopted_step) for r in simulated.index.refreshes] == [(4, 11), (12, 19)]
    assert simulated.index.skipped == [8, 16]


def test_a_refresh_that_is_ready_late_is_waited_for_at_the_age_limit() -> None:
    simulated = run(refreshed(WhenReady(4, 2, 10, NEVER)), replace(DURATIONS, build=1000.0))
    assert simulated.index.refreshes[0].adopted_step == 10
    # Begun at 4, 12 and 16; waited for at 10, at 14, and after the last step.
    assert simulated.waits["index"] == pytest.approx((1000 - 60) + (1000 - 20) + (1000 - 40))


def test_what_is_pending_at_the_end_is_waited_for_before_the_last_index() -> None:
    simulated = run(refreshed(WhenReady(15, 7, NEVER, NEVER)), replace(DURATIONS, build=500.0))
    assert simulated.times.wall == pytest.approx(100 + 150 + 500 + 50)


def test_held_out_texts_are_measured_before_training_and_at_each_refresh() -> None:
    shape = replace(refreshed(AtLag(8, 0, NEVER, NEVER)), heldout=HeldOut(windows=0, k=0, refresh_windows=10))
    simulated = run(shape, replace(DURATIONS, scoring=replace(SCORING, window=0.5)), replicas=2)
    # Eight texts on two replicas, then two; the refreshes at 8 and 16 are waited for with theirs.
    assert simulated.times.steps_began == 100 + 4 * 0.5 + 0.5
    assert simulated.waits["index"] == pytest.approx(2 * (10 + 2.5))
    assert simulated.busy("score") == pytest.approx(20 * 3 + 3 * 10 * 0.5)


def test_busy_time_is_counted_for_every_role() -> None:
    simulated = run(durations=replace(DURATIONS, scoring=replace(SCORING, units=4)), replicas=2)
    assert simulated.busy("score") == pytest.approx(20 * 4 * 3)
    assert simulated.busy("train") == pytest.approx(20 * (1 + 4))
    assert simulated.busy("embed") == pytest.approx(150)
    assert simulated.busy("search") == pytest.approx(40)


def test_checkpoints_and_stages_take_their_time() -> None:
    durations = replace(DURATIONS, checkpoint=1.0, stages=replace(STAGES, start_up=7.0, measure=5.0))
    simulated = run(replace(SHAPE, checkpoint_every=6), durations)
    assert simulated.times.wall == pytest.approx(7 + 100 + 200 + 4 + 50 + 5)  # at 6, 12, 18 and the end


def test_the_same_run_is_simulated_the_same() -> None:
    shape = replace(ahead(2), refresh=AtLag(4, 2, NEVER, 20))
    assert run(shape, replicas=3) == run(shape, replicas=3)


def test_roles_on_one_processor_slow_each_other_down() -> None:
    shape = ahead(1)
    durations = replace(DURATIONS, encode=0.0, search=0.0, scoring=replace(SCORING, unit=4.0))
    places = {role: Place("gpu", 1.0) for role in ("score", "train")}
    apart, together = run(shape, durations), simulate(shape, durations, DeviceAllocation(1, {"gpu": 1.0}, places))
    assert apart.step_ends[-1] == pytest.approx(100 + 4 + 4 + 20 * 4, abs=4)
    assert together.step_ends[-1] == pytest.approx(100 + 20 * (4 + 4))


def test_work_that_arrives_and_ends_changes_the_speed_of_the_rest() -> None:
    env, ends = simpy.Environment(), {}
    processor = Processor(env, 2.0)

    def piece(name: str, start: float, seconds: float, wanted: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(start)
        yield processor.work(seconds, wanted)
        ends[name] = env.now

    for arguments in (("long", 0.0, 6.0, 2.0), ("short", 2.0, 1.0, 2.0), ("idle", 20.0, 1.0, 1.0)):
        env.process(piece(*arguments))
    env.run()
    # Alone for 2 s, then at half speed beside the short one (2 s for its 1), then alone again.
    assert ends == {"short": 4.0, "long": pytest.approx(7.0), "idle": 21.0}
