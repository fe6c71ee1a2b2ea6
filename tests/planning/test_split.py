"""The split that ends soonest, and that its keys lay a run out as the plan says."""

import pytest

from replug.cluster.layout import Layout, lay_out
from replug.cluster.packing import TRAINER
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.planning.accelerators import parse_devices
from replug.planning.memory import run_sizes
from replug.planning.pace import job_of
from replug.planning.training import (
    Assumptions,
    LaidSplit,
    _all_splits,
    _fitted,
    best_split,
    given_split,
    gpus_by_roles,
    laid_plan,
    nodes_of,
    plan_training,
)
from tests.support.command_line import ROOT


def best(config: Config, gpus: str) -> LaidSplit:
    return best_split(job_of(config), parse_devices(gpus))


def test_roles_that_share_eight_gpus_leave_nearly_nothing_idle(paper: Config) -> None:
    found = best(paper, "8xA100").estimate
    assert found.split.by_role() == {"score": 7, "embed": 7, "train": 1}
    assert found.wall_hours < 1.05 * sum(found.hours.values()) / 8


@pytest.mark.parametrize("gpus", ["2xA100", "8xH100", "16xH100"])
def test_of_splits_that_end_as_soon_the_one_with_the_fewest_ranks_is_taken(paper: Config, gpus: str) -> None:
    found, job, devices = best(paper, gpus), job_of(paper), parse_devices(gpus)
    fitting = [laid for split in _all_splits(job, devices) if (laid := _fitted(job, devices, split))]
    least = min(laid.estimate.wall_hours for laid in fitting)
    as_soon = [laid.estimate.split.train for laid in fitting if laid.estimate.wall_hours <= 1.02 * least]
    assert found.estimate.split.train == min(as_soon)
    if min(as_soon) > 1:
        assert all(len(gpu.actors) == 1 for gpu in found.layout.gpus if gpu.has(TRAINER))


def test_an_lm_larger_than_a_gpu_takes_several_for_each_replica(paper: Config) -> None:
    paper.lm.path = "llama-2-70b"
    split = best(paper, "16xA100").estimate.split
    assert (split.gpus_per_replica, split.score) == (2, 2 * split.replicas)
    with pytest.raises(UserError, match=r"2xA10 do not hold the run: scoring needs 139 GB \(7 GPUs for each LM\)"):
        best(paper, "2xA10")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("6/1", "expected GPUs that"),
        ("9/1/1", "which takes 9 GPUs for one role"),
        ("4/1/3", "cannot share train.batch_size=64"),
    ],
)
def test_a_split_that_cannot_be_is_an_error(paper: Config, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"--split is .*{reason}"):
        given_split(job_of(paper), parse_devices("8xA100"), text)


SOONER = ["data.num_documents=1000000", "retriever.path=facebook/contriever", "lm.path=gpt2"]


def laid_out(path: str, overrides: list[str], gpus: str, nodes: int) -> Layout:
    """As `replug train` lays it out, with the keys that the plan prints."""
    settings = plan_training(load_config(path, overrides), gpus, nodes)["settings"]
    config = load_config(path, [*overrides, *settings])
    sizes = run_sizes(config, config.data.num_documents, has_bfloat16=True)
    return lay_out(config, nodes_of(parse_devices(gpus, nodes)), sizes)


@pytest.mark.parametrize("gpus", ["1x1xH200", "1x2xA100", "2x4xH100", "8x8xA100"])
@pytest.mark.parametrize(("name", "own"), [("paper", []), ("debug", SOONER)])
def test_the_keys_of_a_plan_lay_out_its_actors_gpus_and_gigabytes(name: str, own: list[str], gpus: str) -> None:
    nodes, each, kind = gpus.split("x")
    path, devices = str(ROOT / f"configs/{name}.yaml"), f"{int(nodes) * int(each)}x{kind}"
    plan = laid_plan(load_config(path, own), devices, int(nodes))[2].layout
    run = laid_out(path, own, devices, int(nodes))
    assert (run.gpus, run.actors, run.num_waiting) == (plan.gpus, plan.actors, 0)
    assert all(gpu.num_bytes <= gpu.node.gpu_limit for gpu in run.gpus)
    assert sum(group["count"] for group in gpus_by_roles(run)) == int(nodes) * int(each)


def test_two_versions_are_on_two_gpus_or_in_host_memory_and_the_plan_says_which(paper: Config) -> None:
    plan = plan_training(paper, "8xA100", given=Assumptions(split="5/2/1"))
    index = next(group for group in plan["gpus"] if "searcher" in group["roles"])
    assert index["gb"] * index["count"] == pytest.approx(110.6 + (0.92 + 0.54 + 0.72) * index["count"], rel=0.01)
    one = plan_training(paper, "8xA100", given=Assumptions(split="6/1/1"))
    assert one["search_on"] == "host" and "searched in host memory" in " ".join(one["notes"])
    paper.index.gpus_per_searcher = 0
    assert plan_training(paper, "8xA100")["search_on"] == "host"
