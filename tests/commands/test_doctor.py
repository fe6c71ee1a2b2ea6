"""`replug doctor` on machines and configurations; its checks start nothing."""

import sys
from pathlib import Path

import pytest

from replug.commands import doctor
from replug.config.load import load_config
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parent.parent.parent
DEBUG = ROOT / "configs/debug.yaml"


@pytest.fixture
def config(tmp_path):
    def load(*overrides: str):
        return load_config(DEBUG, [f"run_dir={tmp_path / 'run'}", *overrides])

    return load


def test_the_debug_configuration_is_well_here(tmp_path: Path, replug: CommandLine) -> None:
    ended = replug("doctor", DEBUG, f"run_dir={tmp_path / 'run'}")
    assert ended.status == 0, ended.printed
    names = ("CUDA", "shared memory", "configuration", "layout")
    assert all(f" {name} " in ended.output for name in names)
    assert not (tmp_path / "run").exists()
    ended = replug("doctor", "eval_retrieval", "questions.path=q", "data.corpus=c", "retriever.path=stand_in", "out=o")
    assert ended.status == 0 and "keys, types and rules are valid" in ended.output


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("debug train.max_stepz=3", "train.max_stepz"),
        ("debug retriever.path=/no/such", "retriever.path"),
        ("debug data.source=/no/such", "data.source"),
        ("eval_retrieval questions.paht=q", "did you mean questions.path"),
    ],
)
def test_a_configuration_that_a_run_refuses_is_wrong_and_named(replug: CommandLine, typed: str, named: str) -> None:
    ended = replug("doctor", *typed.split())
    assert ended.status == 1 and named in " ".join(ended.output.split())
    assert "ok       CUDA" in ended.output, "the machine is looked at nevertheless"


def test_a_cluster_is_joined_and_says_how_a_run_would_be_laid_out_on_it(config, ray_address):
    check = doctor.layout_check(config(f"ray.address={ray_address}", "resources.score=2"))
    assert check.is_ok
    assert check.result.startswith(f"{ray_address}; index.num_shards 1, resources.index 1, resources.score 2")
    none = doctor.layout_check(config(f"ray.address={ray_address}", "resources.index=20"))
    assert not none.is_ok and "the cluster has 8 CPUs on 1 nodes" in none.result
    assert not sys.modules["ray"].is_initialized()


def test_more_memory_than_the_machine_has_is_wrong(config, monkeypatch):
    monkeypatch.setattr("replug.models.hardware.available_memory", lambda: 10 * 2**30)
    large = config("data.num_documents=36000000", "retriever.path=nobody/nothing")
    assert not doctor.layout_check(large).is_ok and doctor.layout_check(config()).is_ok


def test_a_run_without_its_index_is_told_apart_and_says_how_to_make_one(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "run/retriever").mkdir(parents=True)
    (tmp_path / "run/config.yaml").touch()
    ended = replug("search", tmp_path / "run", "a query")
    run = tmp_path / "run"
    again = f"replug prepare {run}/config.yaml --index retriever.path={run}/retriever run_dir={run}-index"
    assert (ended.status, ended.errors) == (
        2,
        f"replug: {run} is a run without its index; make one of its retriever: {again}\n",
    )
