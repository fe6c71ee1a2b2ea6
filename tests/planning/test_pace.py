"""The closed form, against numbers that are computed by hand for the paper's run."""

import pytest

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.planning.accelerators import find_accelerator, parse_devices
from replug.planning.pace import (
    HOST_CORES,
    RANK_0_PAIR,
    RANK_0_REPLICA,
    RANK_0_STEP,
    Estimate,
    Split,
    core_seconds,
    estimate,
    job_of,
    search_seconds,
)
from replug.planning.training import Assumptions, laid_plan

A100 = 312e12
# Of the run: batch x k pairs of 384 tokens, 36M documents of 130 tokens, 64 x 21 texts of 130 tokens with gradient.
LM_TOKEN, LM_PREDICTION = 2 * 48 * 12 * 1600**2, 2 * 1600 * 50_257
ENCODER_TOKEN = 2 * 12 * 12 * 768**2 + 4 * 12 * 768 * 130
PAIR = (384 * (LM_TOKEN + 4 * 48 * 1600 * 384) + 128 * LM_PREDICTION) / (0.49 * A100)
BUILD = 36_000_000 * 130 * ENCODER_TOKEN / (0.36 * A100)
STEP = 3 * 64 * 21 * 130 * ENCODER_TOKEN / (0.25 * A100)
QUERIES = 64 * 130 * ENCODER_TOKEN / (0.36 * A100)


def planned(config: Config, gpus: str, split: str) -> Estimate:
    return laid_plan(config, gpus, given=Assumptions(split=split))[2].estimate


def test_seconds_of_each_activity_are_its_flop_over_the_rate(paper: Config) -> None:
    found = planned(paper, "8xA100", "5/2/1").seconds
    assert (found.pair, found.build) == (pytest.approx(PAIR), pytest.approx(BUILD))
    assert (found.train, found.encode) == (pytest.approx(STEP), pytest.approx(QUERIES))
    assert pytest.approx(2.02, rel=0.005) == BUILD / 3600
    assert found.units == 61  # calls of 8,192 tokens or more, of 21 pairs each


def test_the_slowest_role_sets_the_pace_of_a_split(paper: Config) -> None:
    """Five GPUs score 1,280 pairs of a step in 2.01 s; two build an index in 1.01 hours, after 1,000 steps are done.

    Of 7 refreshes each is late by what it takes longer than its lag.
    """
    found, score = planned(paper, "8xA100", "5/2/1"), 1280 * PAIR / 5
    late = 7 * max(0.0, BUILD / 2 - 1000 * score)
    assert found.step == pytest.approx(score)
    assert found.waits == pytest.approx(late)
    measuring = 200 * 21 * PAIR / 5
    assert found.wall_hours == pytest.approx((25_000 * score + late + 2 * BUILD / 2 + measuring) / 3600)
    assert found.dominates == "score"


def test_on_one_gpu_the_roles_work_one_after_the_other(paper: Config) -> None:
    split = Split(1, 1, 1, ("score", "embed", "train"), search_on_gpu=True)
    found = estimate(job_of(paper), parse_devices("1xA100"), split)
    assert found.step == pytest.approx(QUERIES + STEP + 1280 * PAIR)
    assert found.stages["training"] * 3600 == pytest.approx(25_000 * found.step + 7 * BUILD)


# Hours until training and the last index end in a simulation by discrete events, at 35% of the peak.
HOURS = {
    ("8xA100", "5/2/1"): 23.2513,
    ("8xA100", "8/8/2"): 15.4979,
    ("64xA100", "60/60/4"): 1.9653,
    ("64xA100", "48/8/8"): 3.7655,
}


@pytest.mark.parametrize(("gpus", "split"), HOURS)
def test_hours_are_near_a_simulation(paper: Config, gpus: str, split: str) -> None:
    found = laid_plan(paper, gpus, given=Assumptions(split=split, efficiency=0.35))[2].estimate
    assert found.wall_hours == pytest.approx(HOURS[gpus, split], rel=0.17)


@pytest.mark.parametrize(
    ("name", "dim", "documents", "nprobe", "milliseconds"),
    [  # of docs/benchmarks.md
        ("flat_fp16", 384, 1_000_000, None, 813),
        ("pq", 128, 10_000_000, None, 464),
        ("IVF8192,PQ192x4fs", 384, 1_000_000, 256, 77),
        ("ivf_sq8", 256, 1_000_000, 128, 132),
    ],
)
def test_a_batch_on_a_core_takes_what_was_measured(
    name: str, dim: int, documents: int, nprobe: int | None, milliseconds: float
) -> None:
    kind = resolve_kind(name, dim, documents, nprobe, rerank=True)
    assert 1000 * core_seconds(kind, dim, documents, 64, 20) == pytest.approx(milliseconds, rel=0.3)


def test_nodes_search_side_by_side_and_searchers_of_one_share_its_cores(paper: Config) -> None:
    job, sixteen = job_of(paper), parse_devices("16xA100")
    assert [Split(1, 1, 1, num_searchers=n).searching(sixteen) for n in (1, 2, 4)] == [1, 2, 2]
    one, two = (search_seconds(job, sixteen, Split(1, 1, 1, num_searchers=n)) for n in (1, 2))
    assert one == pytest.approx(50.6 / HOST_CORES, rel=0.01) == 2 * two
    assert core_seconds(IndexKind("HNSW32,Flat"), 768, 1000, 64, 20) == core_seconds(IndexKind(), 768, 1000, 64, 20)


def test_rank_0_sets_the_pace_where_gpus_score_faster_than_it_hands_out(paper: Config) -> None:
    from replug.planning.training import plan_training

    paper.lm.path = "gpt2"
    plan = plan_training(paper, "64xH100", given=Assumptions(split="60/60/4"))
    rank_0 = RANK_0_STEP + RANK_0_PAIR * 1280 + RANK_0_REPLICA * 60
    assert plan["step_seconds"] == pytest.approx(rank_0) and plan["dominates"] == "rank_0"
    assert any(f"rank 0 needs {rank_0:.2g} s" in note for note in plan["notes"])


def test_a_search_that_takes_longer_than_a_step_dominates_and_a_note_says_so(paper: Config) -> None:
    from replug.planning.training import plan_training

    paper.index.gpus_per_searcher, paper.lm.path = 0.0, "gpt2"
    plan = plan_training(paper, "8xH100", given=Assumptions(split="5/2/1"))
    assert plan["dominates"] == "search"
    assert any("longer than all else of a step" in note for note in plan["notes"])


def test_a_count_and_a_type_are_devices_in_any_spelling_of_the_type() -> None:
    devices = parse_devices("8xa100")
    assert (str(devices), devices.count, devices.nodes) == ("8xA100", 8, 1)


@pytest.mark.parametrize("text", ["8A100", "0xA100", "1.5xA100"])
def test_a_malformed_count_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"--gpus is .*expected COUNTxTYPE.*8xA100"):
        parse_devices(text)


def test_an_unknown_type_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"--gpus is '8xB9000': 'B9000' is unknown; expected one of A100, .*MI300X"):
        parse_devices("8xB9000")
    with pytest.raises(UserError, match="did you mean RTX4090"):
        parse_devices("8xRTX409")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("a100_3g.20gb", None),
        ("rtx_3090_ti", None),
        ("rtx3090ti", None),
        ("NVIDIA A2", None),
    ],
)
def test_a_card_is_known_by_its_longest_name_and_no_other_is_taken_for_it(name: str, known: str | None) -> None:
    found = find_accelerator(name)
    assert (found and found.name) == known


def test_an_efficiency_is_a_share_of_the_peak() -> None:
    assert parse_devices("8xA100").rate("bf16_mixed", "train") == 0.25 * 312e12
    assert parse_devices("8xA100", efficiency=0.5).rate("float32", "score") == 0.5 * 19.5e12
    with pytest.raises(UserError, match=r"--efficiency is 1\.5"):
        parse_devices("8xA100", efficiency=1.5)
