"""What `replug plan` prints, as keys of a run on the same devices, is laid out as those actors on those GPUs."""

from pathlib import Path

import pytest

from replug.cluster.layout import Layout, lay_out
from replug.cluster.packing import USABLE
from replug.config.load import load_config
from replug.planning.accelerators import Devices, parse_devices
from replug.planning.plans import Assumptions, Plan, gpus_by_roles, make_plan, plan_json, settings
from replug.planning.sizes import run_sizes
from replug.planning.split import nodes_of

ROOT = Path(__file__).parents[2]
SOONER = ["train.max_steps=50", "refresh.every_steps=20", "refresh.lag_steps=5"]  # of the same sizes
CONFIGS = ["paper", "quickstart_online", "debug", "own_data_online"]
OWN = {"own_data_online": ["retriever.path=facebook/contriever", "lm.path=gpt2", "data.num_documents=1000000"]}
DEVICES = ["1x8 A100", "2x4 A100", "8x8 A100", "1x8 H100", "2x4 H100", "8x8 H100"]


def devices_of(name: str) -> Devices:
    shape, _, kind = name.partition(" ")
    nodes, each = map(int, shape.split("x"))
    return parse_devices(f"{nodes * each}x{kind}", nodes)


def planned(path: Path, overrides: list[str], devices: Devices) -> Plan:
    assumptions = Assumptions(num_documents=None if "paper" in path.name else 100_000)
    return make_plan(load_config(path, overrides), str(devices), devices.nodes, assumptions=assumptions)


def laid_out(path: Path, overrides: list[str], plan: Plan) -> Layout:
    """As `replug train` would, typed with what the plan says."""
    config = load_config(path, [*overrides, *settings(plan)])
    sizes = run_sizes(config, plan.job.shape.num_documents, has_bfloat16=True)
    return lay_out(config, nodes_of(plan.devices), sizes)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_keys_of_a_plan_lay_out_its_actors_gpus_and_gigabytes(config: str, name: str) -> None:
    path, overrides, devices = ROOT / f"configs/{config}.yaml", [*SOONER, *OWN.get(config, [])], devices_of(name)
    plan = planned(path, overrides, devices)
    run = laid_out(path, overrides, plan)
    assert run.gpus == plan.layout.gpus
    assert run.actors == plan.layout.actors
    assert run.num_waiting == 0
    assert all(gpu.num_bytes <= USABLE * devices.accelerator.memory_gb * 1e9 for gpu in run.gpus)
    shown = plan_json(plan)["gpus"]
    assert shown == gpus_by_roles(run)
    assert sum(kind["count"] for kind in shown) == devices.count


@pytest.mark.parametrize("devices", ["1xA100", "2xA100", "4xA100", "8xA100", "16xA100", "64xA100", "8xH100"])
@pytest.mark.parametrize("own", [[], ["resources.train=auto"]])
def test_the_papers_run_plans_and_lays_out_on_few_gpus_and_many(devices: str, own: list[str]) -> None:
    path, nodes = ROOT / "configs/paper.yaml", 2 if "H100" in devices else None
    plan = make_plan(load_config(path, [*SOONER, *own]), devices, nodes)
    assert laid_out(path, [*SOONER, *own], plan).gpus == plan.layout.gpus
    automatic = load_config(path, own)
    found = lay_out(automatic, nodes_of(plan.devices), run_sizes(automatic, 36_000_000, has_bfloat16=True))
    assert all(0 < gpu.num_bytes <= gpu.node.gpu_limit for gpu in found.gpus)
    assert found.num_waiting == 0


def test_two_versions_are_on_two_gpus_or_in_host_memory_and_the_plan_says_which() -> None:
    config = load_config(ROOT / "configs/paper.yaml", SOONER)
    plan = plan_json(make_plan(config, "8xA100", assumptions=Assumptions(split="5/2/1")))
    index = next(kind for kind in plan["gpus"] if "searcher" in kind["roles"])
    assert index["roles"] == ["searcher", "builder"]
    assert index["gb"] * index["count"] == pytest.approx(110.6 + (0.92 + 0.5) * index["count"], rel=0.01)
    one = plan_json(make_plan(config, "8xA100", assumptions=Assumptions(split="6/1/1")))
    assert one["search_on"] == "host" and "searched in host memory" in " ".join(one["notes"])
    assert not any("searcher" in kind["roles"] for kind in one["gpus"])


def test_keys_that_are_set_are_in_the_plan_too() -> None:
    config = load_config(ROOT / "configs/paper.yaml", [*SOONER, "index.gpus_per_searcher=0"])
    assert plan_json(make_plan(config, "8xA100"))["search_on"] == "host"
