"""Searches on processors: as long as they were measured, hidden where they are, and named where they are not."""

from dataclasses import replace

import pytest

from replug.config.schema import Config
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.planning.accelerators import parse_devices
from replug.planning.estimate import (
    HOST_CORES,
    Split,
    dominating,
    elapsed_hours,
    estimate,
    job_of,
    rates_of,
    search_seconds,
    searching,
)
from replug.planning.host_search import core_seconds
from replug.planning.plans import Assumptions, Plan, make_plan, notes

EIGHT = parse_devices("8xA100")


# Of docs/benchmarks.md: kind, dimensions, documents, lists looked into, candidates for each document, milliseconds.
MEASURED = [
    ("flat_fp16", 384, 1_000_000, None, None, 813),
    ("flat_fp16", 256, 1_000_000, None, None, 371),
    ("flat_fp16", 128, 10_000_000, None, None, 2_366),
    ("pq", 384, 1_000_000, None, 16, 153),
    ("pq", 128, 10_000_000, None, 16, 464),
    ("IVF8192,PQ192x4fs", 384, 1_000_000, 32, 8, 61),
    ("IVF8192,PQ192x4fs", 384, 1_000_000, 256, 8, 77),
    ("IVF16384,PQ64x4fs", 128, 10_000_000, 64, 8, 49),
    ("IVF16384,PQ64x4fs", 128, 10_000_000, 256, 8, 82),
    ("IVF16384,PQ64x4fs", 128, 10_000_000, 128, 64, 120),
    ("ivf_pq", 256, 1_000_000, 128, 8, 37),
    ("ivf_sq8", 256, 1_000_000, 128, 4, 132),
    ("sq8", 256, 1_000_000, None, 4, 2_968),
    ("IVF4096,PQ64", 256, 1_000_000, 128, 4, 76),
    ("IVF4096,RaBitQfs", 256, 1_000_000, 256, 16, 93),
]


@pytest.mark.parametrize(("name", "dim", "documents", "nprobe", "over", "milliseconds"), MEASURED)
def test_a_batch_takes_what_was_measured(
    name: str, dim: int, documents: int, nprobe: int | None, over: int | None, milliseconds: float
) -> None:
    kind = resolve_kind(name, dim, documents, nprobe, rerank=True, overretrieve=over)
    assert 1000 * core_seconds(kind, dim, documents, 64, 20) == pytest.approx(milliseconds, rel=0.3)


def test_a_lossy_kind_in_parts_is_more_work_and_an_exact_search_is_not() -> None:
    kind = resolve_kind("IVF8192,PQ64x4fs", 128, 1_000_000, 64, rerank=True, overretrieve=8)
    whole, part = (core_seconds(kind, 128, 1_000_000, 64, 20, parts) for parts in (1, 4))
    assert [whole, 4 * part] == pytest.approx([0.026, 0.087], rel=0.3)
    exact = [parts * core_seconds(IndexKind(), 128, 1_000_000, 64, 20, parts) for parts in (1, 4)]
    assert exact[0] == exact[1]


@pytest.mark.parametrize(("name", "seconds"), [("flat_fp16", 50.6), ("pq", 9.66), ("ivf_pq", 1.06)])
def test_the_papers_batch_takes_what_the_documents_say(name: str, seconds: float) -> None:
    kind = resolve_kind(name, 768, 36_000_000, None, rerank=True, overretrieve=None)
    assert core_seconds(kind, 768, 36_000_000, 64, 20) == pytest.approx(seconds, rel=0.01)


def test_a_kind_of_unknown_codes_takes_as_long_as_exact_products_with_what_it_looks_into() -> None:
    exact = core_seconds(IndexKind(), 768, 1_000_000, 64, 20)
    assert core_seconds(IndexKind("HNSW32,Flat"), 768, 1_000_000, 64, 20) == exact
    assert core_seconds(IndexKind("IVF1024,LSH", nprobe=256), 768, 1_000_000, 64, 20) == exact / 4


def test_nodes_search_side_by_side_and_searchers_of_one_share_its_cores(paper: Config) -> None:
    job, sixteen = job_of(paper), parse_devices("16xA100")
    rates = rates_of(sixteen, paper)
    nodes = [searching(Split(1, 1, 1, num_searchers=n), sixteen) for n in (1, 2, 4)]
    assert nodes == [1, 2, 2]
    assert search_seconds(job, rates, 2) == search_seconds(job, rates, 1) / 2
    assert search_seconds(job, rates, 1) == pytest.approx(50.6 / HOST_CORES, rel=0.01)


@pytest.fixture
def searched(paper: Config) -> Plan:
    """A short run of the paper's shares on eight GPUs that roles share, searched in host memory."""
    paper.train.max_steps, paper.refresh.every_steps, paper.refresh.lag_steps = 600, 200, 100
    paper.data.num_documents, paper.index.gpus_per_searcher = 2_400_000, 0.0
    return make_plan(paper, str(EIGHT), assumptions=Assumptions(split="8/8/1"))


def with_searches(plan: Plan, of_a_step: float) -> Plan:
    """The same, with searches that take so much of a step."""
    rates = rates_of(EIGHT, plan.job.config)
    times = of_a_step * step_seconds(plan) / plan.estimate.durations.search
    slower = replace(rates, search=rates.search / times, search_bandwidth=rates.search_bandwidth / times)
    return replace(plan, estimate=estimate(plan.job, slower, EIGHT, plan.estimate.split))


def step_seconds(plan: Plan) -> float:
    times = plan.estimate.simulated.times
    return (times.training_ended - times.steps_began) / plan.job.shape.steps


def test_a_search_that_is_hidden_behind_the_lm_does_not_dominate(searched: Plan) -> None:
    slow = with_searches(searched, 0.9)
    hours = elapsed_hours(slow.job, slow.estimate)
    assert max(hours, key=lambda role: hours[role]) == "search"
    assert step_seconds(slow) == pytest.approx(step_seconds(searched), rel=0.06)
    assert dominating(slow.job, slow.estimate) == "score"
    assert not any("longer than all else" in note for note in notes(slow))


def test_a_search_that_the_trainer_waits_for_dominates_and_a_note_says_which_kind_keeps_ahead(searched: Plan) -> None:
    slow = with_searches(searched, 2)
    assert dominating(slow.job, slow.estimate) == "search"
    assert any(
        "longer than all else of a step" in note and "index.kind=pq index.num_shards=1" in note for note in notes(slow)
    )


def test_where_a_slower_kind_does_not_keep_ahead_the_note_names_the_faster(searched: Plan) -> None:
    assert any("index.kind=ivf_pq" in note for note in notes(with_searches(searched, 8)))


def test_where_no_kind_keeps_ahead_the_note_asks_for_nodes(searched: Plan) -> None:
    assert any("more nodes that search" in note for note in notes(with_searches(searched, 1000)))


def test_a_search_is_at_work_for_as_long_as_it_takes_where_steps_are_passed_over(searched: Plan) -> None:
    busy = searched.estimate.simulated.busy("search")
    assert busy == pytest.approx(600 * searched.estimate.durations.search, rel=0.01)
