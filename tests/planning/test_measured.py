"""Calibration from run directories made by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.manifest import write_checksums, write_mark
from replug.planning.measured import calibrate, devices_of, job_of_run, observe, read_run
from replug.planning.plans import Plan, make_plan, plan_json

RunDir = Callable[..., Path]


def planned(folder: Path, *overrides: str, gpus: str | None = None) -> Plan:
    config = load_config(folder / "config.yaml", overrides)
    return make_plan(config, gpus, measured_run=folder)


def test_what_activities_took_is_read_from_the_rows(run_dir: RunDir) -> None:
    run = read_run(run_dir())
    seen = observe(run, job_of_run(run, None, None))
    assert seen.train == pytest.approx(0.1)
    assert seen.encode == pytest.approx(0.02 * 39 / 37)  # the last two steps find their batch in flight already
    assert seen.pair == 0  # the stand-in sleeps 0.5 s, and does nothing else
    assert seen.build == pytest.approx(1.2)
    assert seen.checkpoint == pytest.approx(0.03)
    stages = seen.stages
    assert (stages.start_up, stages.first_build, stages.last_build, stages.measure) == (6.0, 5.0, 4.0, 8.0)
    assert stages.warm_up == pytest.approx(0.0)
    assert stages.outside == pytest.approx(1.0)


def test_a_pair_takes_a_replica_its_share_of_the_busy_time(run_dir: RunDir) -> None:
    run = read_run(run_dir("lm.path=stand_in"))
    assert observe(run, job_of_run(run, None, None)).pair == pytest.approx(0.5 / 64)


def test_the_plan_of_the_run_itself_takes_as_long_as_the_run(run_dir: RunDir) -> None:
    folder = run_dir()
    times = read_run(folder).times
    plan = plan_json(planned(folder))
    assert 3600 * plan["wall_hours"] == pytest.approx(times["total"], rel=0.05)
    assert plan["dominates"] == "score"
    assert plan["documents"] == 600


def test_twice_the_steps_take_twice_the_training(run_dir: RunDir) -> None:
    folder = run_dir()
    once, twice = (planned(folder, f"train.max_steps={steps}").estimate.simulated.times for steps in (40, 80))
    longer = (twice.training_ended - twice.training_began) / (once.training_ended - once.training_began)
    assert longer == pytest.approx(2, rel=0.03)


def test_batches_that_nobody_waited_for_were_answered_in_the_first_step(run_dir: RunDir) -> None:
    waited = read_run(run_dir("lm.path=stand_in"))
    idle = read_run(run_dir("lm.path=stand_in", time__wait_scores_seconds=0.0))
    pairs = [observe(run, job_of_run(run, None, None)).pair for run in (waited, idle)]
    assert pairs[1] / pairs[0] == pytest.approx(39 / 37)  # 39 steps' worth of work, over the pairs of 37


def test_a_refresh_that_was_waited_for_is_measured_from_trigger_to_adoption(run_dir: RunDir) -> None:
    run = read_run(run_dir("refresh.lag_steps=2", time__wait_index_seconds=0.4))
    assert observe(run, job_of_run(run, None, None)).build == pytest.approx(2 * 0.5 + 0.4)


def test_without_a_refresh_the_first_index_is_the_measure(run_dir: RunDir) -> None:
    run = read_run(run_dir("train.max_steps=8"))
    assert observe(run, job_of_run(run, None, None)).build == 5.0


def test_two_machines_have_twice_the_cores_for_the_actors_of_the_configuration(run_dir: RunDir) -> None:
    folder = run_dir("lm.path=stand_in")
    layout = ["lm.num_replicas=2", "lm.threads_per_replica=2", "train.batch_size=64"]
    plans = [planned(folder, *layout, gpus=gpus) for gpus in (None, "2xmeasured")]
    assert str(plans[1].devices) == "2xmeasured"
    assert plans[1].estimate.simulated.times.wall < plans[0].estimate.simulated.times.wall


def test_actors_with_half_the_threads_are_half_as_fast(run_dir: RunDir) -> None:
    folder = run_dir("lm.path=stand_in", "lm.threads_per_replica=2")
    units = [planned(folder, f"lm.threads_per_replica={n}").estimate.durations.scoring.unit for n in (1, 2)]
    assert units[0] == pytest.approx(2 * units[1])


def test_roles_that_shared_cores_are_faster_alone(run_dir: RunDir) -> None:
    apart = read_run(run_dir("lm.path=stand_in"))
    rates = calibrate(apart, job_of_run(apart, None, None))
    crowded = read_run(run_dir("lm.path=stand_in", "train.threads=2", "lm.threads_per_replica=2"))
    job = job_of_run(crowded, None, None)
    assert calibrate(crowded, job).train > rates.train
    assert calibrate(crowded, job).score > rates.score
    assert str(devices_of(crowded)) == "1xmeasured"


@pytest.mark.parametrize(
    "key", ["time/train_seconds", "time/retrieve_seconds", "scoring/misses", "scoring/replica_0/tokens_per_second"]
)
def test_a_metric_that_is_missing_is_an_error_that_names_it(run_dir: RunDir, key: str) -> None:
    with pytest.raises(UserError, match=rf"metrics\.jsonl has no {key} at step"):
        planned(run_dir(**{key.replace("/", "__"): None}))


def test_a_file_that_is_missing_is_an_error_that_names_it(run_dir: RunDir) -> None:
    folder = run_dir()
    (folder / "run_times.json").unlink()
    with pytest.raises(UserError, match=r"--measured: .*run_times\.json is missing"):
        planned(folder)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", "run_times.json"])
def test_a_file_that_is_not_what_the_run_wrote_is_an_error_that_names_it(run_dir: RunDir, name: str) -> None:
    folder = run_dir()
    write_checksums(folder)
    planned(folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(b"2", b"3", 1))
    with pytest.raises(UserError, match=rf"{name}.*--measured takes a run as it ended"):
        planned(folder)


def test_a_damaged_manifest_of_the_runs_set_is_an_error_that_names_it(run_dir: RunDir) -> None:
    folder = run_dir()
    (folder / "data").mkdir()
    write_mark(folder / "data/manifest.json", {"counts": {"documents": 200}})
    text = (folder / "data/manifest.json").read_text()
    (folder / "data/manifest.json").write_text(text.replace("200", "300"))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        job_of_run(read_run(folder), None, None)


def test_a_time_that_is_missing_is_an_error_that_names_it(run_dir: RunDir) -> None:
    folder = run_dir()
    (folder / "run_times.json").write_text("{}")
    with pytest.raises(UserError, match=r"run_times\.json has no first_index"):
        planned(folder)


def test_rows_that_skip_steps_are_an_error(run_dir: RunDir) -> None:
    folder = run_dir()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[::2]))
    with pytest.raises(UserError, match="lacks steps"):
        planned(folder)


def test_a_run_of_too_few_steps_is_an_error(run_dir: RunDir) -> None:
    with pytest.raises(UserError, match="has 3 steps; expected more than"):
        planned(run_dir("train.max_steps=3"))


def test_a_run_that_scored_nothing_is_an_error(run_dir: RunDir) -> None:
    with pytest.raises(UserError, match="empty cache"):
        planned(run_dir(scoring__misses=0.0))


def test_other_devices_than_those_measured_are_an_error(run_dir: RunDir) -> None:
    with pytest.raises(UserError, match="expected such as 2xmeasured"):
        planned(run_dir(), gpus="8xA100")
